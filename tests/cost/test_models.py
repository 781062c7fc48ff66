"""Catalogue, work, memory and the latency models that rest on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import Role
from jdserve.core.profile import Profile, ProfileRow
from jdserve.core.steptime import StepFeatures, StepTime
from jdserve.cost.a100 import A100_MODELS, NO_OVERHEAD, A100Profile, Overhead, a100_kv_tokens
from jdserve.cost.cluster import Cluster
from jdserve.cost.fit import fit_steps, nonnegative_least_squares
from jdserve.cost.fitted import FittedModel
from jdserve.cost.hardware import HARDWARE, hardware
from jdserve.cost.latency import LatencyModel, Unmeasured, linearised
from jdserve.cost.memory import GIB, memory
from jdserve.cost.models import MODELS, model
from jdserve.cost.network import Network
from jdserve.cost.paper import PaperModel
from jdserve.cost.roofline import Efficiency, RooflineModel
from jdserve.cost.stepcost import FS
from jdserve.cost.work import all_reduce_bytes, flops, kv_bytes, traffic

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("opt-125m", 0.1252),
        ("opt-350m", 0.3310),
        ("opt-1.3b", 1.316),
        ("opt-2.7b", 2.652),
        ("opt-6.7b", 6.659),
        ("opt-13b", 12.85),
        ("opt-30b", 29.97),
        ("mixtral-8x7b", 46.70),
        ("qwen3-30b-a3b", 30.53),
        ("opt-66b", 65.7),
        ("opt-175b", 174.6),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("qwen2.5-7b", 7.615),
        ("qwen3-32b", 32.76),
        ("smollm2-135m", 0.1345),
    ],
)
def test_catalogue_counts_its_weights(name: str, billions: float) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_catalogue_knows_kv_of_the_examples() -> None:
    assert model("llama-2-70b").kv_bytes_per_token("bfloat16") == 327_680
    assert 512 * model("opt-66b").kv_bytes_per_token("float16") / GIB == pytest.approx(1.13, abs=0.01)  # of 512 tokens
    with pytest.raises(InvalidPlan, match=r"known: opt-125m"):
        model("gpt-9")


def test_hardware_tells_where_its_figures_come_from() -> None:
    assert {"a100-80g", "h100-80g", "h200", "b200", "tpu-v5e", "tpu-v5p", "tpu-v6e", "cpu-core"} <= set(HARDWARE)
    assert all(row.sources and row.float32 <= row.bfloat16 for row in HARDWARE.values())
    with pytest.raises(InvalidPlan, match="known: a100-80g"):
        hardware("tpu-v9")


@pytest.mark.parametrize("file", sorted((ROOT / "plans" / "clusters").glob("*.json")), ids=lambda file: file.stem)
def test_a_shipped_cluster_is_valid(file: Path) -> None:
    cluster = Cluster.load(file)
    assert len(cluster.names) == cluster.nodes
    assert cluster.device.name == cluster.hardware


@pytest.mark.parametrize(
    ("fields", "path"),
    [({"hardware": "h900"}, "hardware"), ({"nodes": 0}, "nodes"), ({"hosts": ("a",)}, "hosts")],
)
def test_a_broken_cluster_is_refused(fields: dict, path: str) -> None:
    with pytest.raises(InvalidPlan, match=path):
        Cluster(**{"hardware": "h100-80g", "nodes": 2, "devices_per_node": 8} | fields)


def test_work_of_a_70b_token() -> None:
    spec = model("llama-2-70b")
    assert flops(spec).new_token == pytest.approx(2 * spec.parameters, rel=0.01)
    assert flops(spec, 4, 2).new_token == flops(spec).new_token / 8
    assert traffic(spec, "bfloat16").base == pytest.approx(2 * spec.parameters, rel=0.01)
    # attention of one layer and head: q k and p v, half of them behind the causal mask
    assert flops(spec).new_pair == 80 * 64 * 2 * 2 * 128 / 2
    assert all_reduce_bytes(spec, "bfloat16").new_token == 0
    assert all_reduce_bytes(spec, "bfloat16", 2).new_token == 2 * 80 * 8192 * 2


def test_every_expert_computes_every_token() -> None:
    spec = model("mixtral-8x7b")
    assert flops(spec).new_token == pytest.approx(2 * spec.parameters, rel=0.01)
    assert traffic(spec, "bfloat16", 8).base == pytest.approx(2 * spec.parameters / 8, rel=0.01)


def test_kv_heads_are_repeated_when_there_are_fewer_than_devices() -> None:
    spec = model("qwen2.5-7b")
    assert kv_bytes(spec, "bfloat16", 4) * 4 == spec.kv_bytes_per_token("bfloat16")
    assert kv_bytes(spec, "bfloat16", 28) == kv_bytes(spec, "bfloat16", 4)


@pytest.mark.parametrize("name", A100_MODELS)
def test_memory_agrees_with_what_the_reference_engine_found(name: str) -> None:
    """KV capacities of real A100s, within a twelfth, where they are not next to nothing."""
    for (tp, pp), tokens in a100_kv_tokens(name).items():
        spec = model(name)
        if tokens < 60_000 or spec.heads % tp or spec.layers % pp:
            continue
        fits = memory(
            spec,
            "float16",
            tp,
            pp,
            device_bytes=hardware("a100-80g").memory_bytes,
            page_size=16,
            max_model_len=2048,
            step_tokens=2048,
            batch=256,
        )
        assert fits.pages * 16 == pytest.approx(tokens, rel=1 / 12), (tp, pp)


@pytest.mark.parametrize("name", ["llama-2-70b", "opt-13b", "smollm2-135m", "mixtral-8x7b"])
def test_memory_holds_every_weight_of_the_largest_stage(name: str) -> None:
    spec = model(name)

    def weights(pp: int) -> int:
        got = memory(
            spec,
            "bfloat16",
            1,
            pp,
            device_bytes=1 << 40,
            page_size=16,
            max_model_len=64,
            step_tokens=64,
            batch=1,
        )
        return got.weights

    assert weights(1) == 2 * spec.parameters
    table = 2 * spec.hidden * (spec.vocab + (spec.context if spec.learned_positions else 0))
    assert weights(2) == pytest.approx(
        spec.parameters - table / 2 * (1 if spec.tied_embeddings else 2) + table, rel=1e-4
    )


def test_memory_says_what_is_missing() -> None:
    got = memory(
        model("llama-3-70b"),
        "bfloat16",
        1,
        1,
        device_bytes=hardware("h100-80g").memory_bytes,
        page_size=16,
        max_model_len=8192,
        step_tokens=8192,
        batch=256,
    )
    assert not got.fits
    assert got.reason.startswith("does not fit: needs 136.")
    assert got.reason.endswith("have 73.28")


def test_nonnegative_least_squares() -> None:
    assert nonnegative_least_squares([[1, 0], [1, 1], [1, 2]], [1, 3, 5]) == pytest.approx((1, 2))
    assert nonnegative_least_squares([[1, 0], [1, 1], [1, 2]], [4, 3, 2]) == pytest.approx(
        (3, 0)
    )  # the slope would be negative
    assert nonnegative_least_squares([[1, 2], [2, 4]], [1, 2]) == pytest.approx((1, 0))  # columns that say the same
    assert nonnegative_least_squares([[0.0], [0.0]], [1, 1]) == (0,)


TRUE = StepTime(4e-3, 1e-4, 2e-9, 4e-9, 3e-4, 5e-8)


def profile(spec: str = "smollm2-135m") -> Profile:
    rows = []
    for batch in (1, 4):
        for tokens in (64, 256, 1024):
            for context in (0, 512):
                f = StepFeatures(tokens, tokens**2 // batch, tokens * context // batch)
                rows.append(ProfileRow("prefill", 1, 1, batch, tokens, context, TRUE.seconds(f)))
        for context in (128, 2048):
            f = StepFeatures(decode_seqs=batch, decode_context=context * batch)
            rows.append(ProfileRow("decode", 1, 1, batch, batch, context * batch, TRUE.seconds(f)))
    f = StepFeatures(100, 10_000, 0, 3, 600)
    rows.append(ProfileRow("mixed", 1, 1, 4, 103, 600, TRUE.seconds(f)))
    return Profile(device="toy", model=model(spec), dtype="float32", rows=tuple(rows))


def test_a_profile_gives_back_the_coefficients_that_made_it() -> None:
    fitted = FittedModel(profile())
    time = fitted.steptime("prefill", 1, 1)
    assert (time.base, time.per_new_token, time.per_prefix_pair) == pytest.approx((4e-3, 1e-4, 4e-9), rel=1e-6)
    assert fitted.steptime("decode", 1, 1).per_context_token == pytest.approx(5e-8)
    assert fitted.error.worst < 1e-9
    assert "mean error 0.0%" in fitted.name


def test_a_profile_that_is_not_linear_tells_its_error() -> None:
    rows = [ProfileRow("decode", 1, 1, 1, 1, c, s) for c, s in ((100, 0.010), (200, 0.010), (400, 0.020))]
    fitted = FittedModel(Profile(device="toy", model=model("smollm2-135m"), dtype="float32", rows=tuple(rows)))
    assert 0.05 < fitted.error.mean <= fitted.error.worst < 0.5


def test_stages_that_were_not_measured_share_what_was() -> None:
    fitted = FittedModel(profile(), hand_off_s=1e-3)
    f = StepFeatures.of([(0, 256)])
    whole, (first, second) = fitted.cost("prefill", 1, 1).stages(f)[0], fitted.cost("prefill", 1, 2).stages(f)
    assert first == second == pytest.approx(whole / 2 + FS // 1000, rel=1e-6)
    with pytest.raises(Unmeasured, match=r"no prefill rows for tp 2 pp 1; measured \(tp x pp\): 1x1"):
        fitted.cost("prefill", 2, 1)


def test_paper_model_of_measured_steps() -> None:
    spec = model("opt-13b")
    real = A100Profile("opt-13b", overhead=NO_OVERHEAD)
    prompts = [StepFeatures.of([(0, n)]) for n in (64, 256, 512, 1024, 2048)]
    batches = [StepFeatures(decode_seqs=b, decode_context=b * c) for b in (8, 32, 64) for c in (128, 512)]

    def measured(role: Role, steps: list[StepFeatures]) -> list[tuple[StepFeatures, float]]:
        return [(f, sum(real.cost(role, 1, 1).stages(f)) / FS) for f in steps]

    paper = PaperModel.fit(spec, measured("prefill", prompts), measured("decode", batches))
    for role, steps, error in (("prefill", prompts, 1e-6), ("decode", batches, 0.15)):
        for f, seconds in measured(role, steps):
            assert sum(paper.cost(role, 1, 1).stages(f)) / FS == pytest.approx(seconds, rel=error)
    assert paper.steptime("prefill", 2, 1).per_new_token == paper.steptime("prefill", 1, 1).per_new_token / 2


def test_a100_profile_evaluates_the_formula_of_its_authors() -> None:
    a100 = A100Profile("opt-13b")
    prompt = 300
    ms = (14.742973695171262 + 0.06857720739764 * prompt + 2.4495727400243586e-06 * prompt**2) / 2 + 2
    first, second = (x / 1e12 for x in a100.cost("prefill", 2, 2).stages(StepFeatures.of([(0, prompt)])))
    assert (first, second) == pytest.approx((ms + 2 + 1e-4 * prompt, ms), rel=1e-8)
    for batch, (a, b, c) in (
        (94, (19.934702624895458, 0.0006269356524350583, 0.03850697740828398)),
        (95, (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046)),
    ):
        f = StepFeatures(decode_seqs=batch, decode_context=batch * 401)  # 400 tokens and the one fed in
        ms = a + b * batch * 401 + c * batch + 1 + 2 + 1e-4 * batch * 400
        assert a100.cost("decode", 1, 1).stages(f)[0] / 1e12 == pytest.approx(ms, rel=1e-9)


def test_an_overhead_of_its_own_is_added_to_what_was_measured() -> None:
    own = Overhead(first_s=0.5, new_token_s=0.0, context_s=0.25, seq_s=0.125, prefill_s=4.0, prefill=2.0, decode=3.0)
    plain, changed = (A100Profile("opt-13b", overhead=added) for added in (NO_OVERHEAD, own))
    prompts, batch = StepFeatures.of([(0, 9), (0, 4)]), StepFeatures.of([], [5, 6, 7])

    def seconds(model: A100Profile, role: Role, f: StepFeatures) -> float:
        return sum(model.cost(role, 1, 1).stages(f)) / FS

    expected = 2 * seconds(plain, "prefill", prompts) + 1e-3 + 0.5 + 4
    assert seconds(changed, "prefill", prompts) == pytest.approx(expected)
    assert seconds(changed, "colocated", prompts) == pytest.approx(expected)
    expected = 3 * seconds(plain, "decode", batch) + 1e-3 + 0.5 + 3 * 0.125 + (4 + 5 + 6) * 0.25
    assert seconds(changed, "decode", batch) == pytest.approx(expected)
    assert seconds(changed, "colocated", batch) == pytest.approx(expected)


def test_a100_profile_interpolates_tensor_parallelism() -> None:
    f = StepFeatures.of([(0, 512)])
    costs = [sum(A100Profile("opt-175b").cost("prefill", tp, 3).stages(f)) for tp in (2, 3, 4)]
    assert costs == sorted(costs, reverse=True)
    with pytest.raises(Unmeasured, match=r"tp \[1, 2, 4\], not 8"):
        A100Profile("opt-13b").cost("prefill", 8, 1)
    with pytest.raises(Unmeasured, match="known: opt-13b"):
        A100Profile("opt-30b")


def test_roofline_is_near_published_runs() -> None:
    """llama-2-70b on H100 in `splitwise_perf_model_median.csv`: prefill of 2,048 tokens on 2, 4 and 8 devices."""
    roofline = RooflineModel(spec=model("llama-2-70b"), dtype="bfloat16", device=hardware("h100-80g"))
    for tp, seconds in ((2, 0.310), (4, 0.201), (8, 0.137)):
        assert sum(roofline.cost("prefill", tp, 1).stages(StepFeatures.of([(0, 2048)]))) / FS == pytest.approx(
            seconds, rel=0.3
        )


def test_roofline_at_its_peaks_is_the_bound() -> None:
    peak = Efficiency(compute=1, memory=1, link=1, step_s=0)
    roofline = RooflineModel(spec=model("llama-2-70b"), dtype="bfloat16", device=hardware("h100-80g"), efficiency=peak)
    one = sum(roofline.cost("decode", 1, 1).stages(StepFeatures(decode_seqs=1, decode_context=1))) / FS
    assert one == pytest.approx(2 * 68.7e9 / 3.35e12, rel=0.01)
    long = sum(roofline.cost("prefill", 1, 1).stages(StepFeatures.of([(0, 512)]))) / FS
    assert long == pytest.approx(512 * 2 * 68.7e9 / 989e12, rel=0.05)


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
def test_plan_coefficients_are_near_the_model(role: Role) -> None:
    models: list[LatencyModel] = [
        RooflineModel(spec=model("llama-3-8b"), dtype="bfloat16", device=hardware("h100-80g")),
        A100Profile("opt-13b"),
        FittedModel(profile()),
    ]
    for one in models:
        fit = linearised(one.cost(role, 1, 1), role)
        assert fit.error.mean < 0.15, (one.name, fit)
        assert one.steptime(role, 1, 1).base >= 0


def test_fit_is_exact_where_the_truth_is_linear() -> None:
    steps = [StepFeatures.of([(s, n)], [c] * b) for s, n, c, b in [(0, 64, 10, 1), (8, 32, 99, 4), (0, 9, 300, 7)] * 2]
    assert fit_steps(steps, [TRUE.seconds(f) for f in steps]).error.worst < 1e-9


def test_routes_take_their_busiest_link() -> None:
    network = Network(hardware("h100-80g"), efficiency=1.0)
    prefill = ((("a", 0), ("a", 1)),)
    inside = network.route(prefill, ((("a", 2),),))
    assert inside.bytes_per_s == 450_000_000_000  # both halves enter through one port
    assert inside.links == ("in a/2", "out a/0", "out a/1")
    across = network.route(prefill, ((("b", 0), ("b", 1)),))
    assert (across.bytes_per_s, across.across) == (100_000_000_000, True)
    assert network.route(prefill, prefill).time(10**9) == 0
    # two stages to one: the layers of each stage leave through its own device
    assert network.route(((("a", 0),), (("a", 1),)), ((("b", 0),),)).bytes_per_s == 50_000_000_000


def test_one_adapter_for_a_node_carries_all_of_it() -> None:
    cluster = Cluster.load(ROOT / "plans" / "clusters" / "a100x32-25g.json")
    network = Network(cluster.device, efficiency=1.0)
    route = network.route(((("node0", 0), ("node0", 1)),), ((("node1", 0), ("node1", 5)),))
    assert route.bytes_per_s == 3_125_000_000
    assert route.time(0) == 20_000_000_000
