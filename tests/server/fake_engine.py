"""A scripted engine and small tokenizers for the tests of the HTTP front.

Token i of an answer is prompt[i % len(prompt)] unless a script says otherwise, so a test computes every answer by hand.
The log-probability of token t is -(t % 8 + 1) / 8; the k likeliest are t, t+1, ... (mod 300), each one less likely.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import httpx
import msgspec
import uvicorn
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jdserve.core.errors import InvalidPlan
from jdserve.core.plan import DecodeInstance, HostedStage, Instance, Plan, PrefillInstance, Worker
from jdserve.core.request import SLO, FinishReason, Request
from jdserve.core.spec import ModelSpec
from jdserve.runtime.outputs import EngineStats, InstanceStats, Phases, TokenLogprobs, TokenOutput
from jdserve.server.app import create_app
from jdserve.server.operations import Operations
from jdserve.server.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('tool first') }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level(*, bos: bool = False, template: str | None = TEMPLATE) -> Tokenizer:
    """A byte-level BPE of about 300 tokens. With ``bos``, encoding a text puts ``<s>`` before it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog, hello world"] * 4, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend, special={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=template)


def byte_fallback() -> Tokenizer:
    """A vocabulary like LLaMA 2's: words after a metaspace, single bytes for the rest, a leading space stripped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "a", "b", "▁a", "ab", "▁ab", "é", "▁▁", "!"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁", "▁")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, special={"bos_token": "<s>", "eos_token": "</s>"})


class Progress(msgspec.Struct, frozen=True):
    stage: str = "compile"
    done: float | None = 0.5
    error: str | None = None


def logprob(token: int, top: int) -> TokenLogprobs:
    value = -(token % 8 + 1) / 8
    return TokenLogprobs(token, value, 1, tuple(((token + i) % 300, value - i) for i in range(top)))


def tiny_plan() -> Plan:
    """One prefill and one decode instance; an SLO that every request meets."""
    return Plan(
        model="tiny",
        max_model_len=64,
        slo=SLO(60.0, 60.0),
        instances=(
            PrefillInstance(name="p0", pages=64, lm_tokens=64, max_batch=4),
            DecodeInstance(name="d0", pages=64, max_num_seqs=4),
        ),
        workers=(Worker("p0", (HostedStage("p0", (0,)),)), Worker("d0", (HostedStage("d0", (1,)),))),
    )


class FakeEngine:
    """Attributes say what a test wants, and what happened.

    Attributes:
        script: token i of a request.
        per_output: tokens per output.
        fail_after: raise ``failure`` instead of giving this token; ``refused`` as in the output.
        hold_at: wait for ``go`` before this token; ``holding`` is set then.
        refuse: raised before the first output.
        phases: of every output.
        begun, cancelled, requests: ids in order, and what came in. ``on_cancel`` is set at each cancel.
    """

    def __init__(self, vocab: int = 300, max_model_len: int = 64, eos: tuple[int, ...] = (1,)) -> None:
        self.spec = ModelSpec("LlamaForCausalLM", 1, 8, 8, 1, 1, 8, vocab, max_model_len, eos=eos)
        self.max_model_len = max_model_len
        self.plan = tiny_plan()
        self.started, self.ready, self.draining, self.progress = True, True, False, Progress()
        self.script: Callable[[Request, int], int] = lambda request, i: request.prompt[i % len(request.prompt)]
        self.per_output = 1
        self.cached_tokens = 0
        self.fail_after: int | None = None
        self.failure: Exception | FinishReason = RuntimeError("boom at /secret/path")
        self.refused = False
        self.hold_at: int | None = None
        self.holding, self.go, self.on_cancel = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.refuse: Exception | None = None
        self.phases: Phases | None = None
        self.requests: list[Request] = []
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.produced = 0
        self.calls: list[str] = []

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        self.running.add(request.id)
        ended = False
        try:
            async for output in self._outputs(request):
                ended = output.finish is not None
                yield msgspec.structs.replace(output, phases=self.phases)
        except GeneratorExit:
            raise
        except Exception:
            ended = True
            raise
        finally:
            self.running.discard(request.id)
            if not ended:
                self.cancelled.append(request.id)
                self.on_cancel.set()

    async def _outputs(self, request: Request) -> AsyncIterator[TokenOutput]:
        params = request.params
        scores = None
        if params.prompt_logprobs is not None:
            scores = tuple(logprob(token, params.prompt_logprobs) for token in request.prompt[1:])
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.spec.eos))
        done, finish = 0, "length" if params.max_tokens == 0 else None
        if finish:
            yield TokenOutput(request.id, prompt_logprobs=scores, finish="length")
        while finish is None:
            tokens: list[int] = []
            while finish is None and len(tokens) < self.per_output:
                await asyncio.sleep(0)  # other samples get their turn
                if done == self.hold_at:
                    self.holding.set()
                    await self.go.wait()
                if done == self.fail_after:
                    if isinstance(self.failure, Exception):
                        raise self.failure
                    yield TokenOutput(request.id, finish=self.failure, error="decode died", refused=self.refused)
                    return
                tokens.append(self.script(request, done))
                done += 1
                self.produced += 1
                finish = "stop" if tokens[-1] in stops else "length" if done == params.max_tokens else None
            tops = () if params.logprobs is None else tuple(logprob(token, params.logprobs) for token in tokens)
            yield TokenOutput(request.id, tuple(tokens), tops, scores, finish, cached_tokens=self.cached_tokens)
            scores = None

    def stats(self) -> EngineStats:
        prefill = InstanceStats("p0", "prefill", pages_total=64, pages_free=64, steps=7, busy_s=2.5, bubble_s=1.5)
        moved = {"transfers": 3, "transfer_bytes": 4096, "transfer_s": 0.25}
        decode = InstanceStats("d0", "decode", running=len(self.running), pages_total=64, pages_free=64, **moved)
        return EngineStats((prefill, decode), dead={"d0": "killed"}, restarts=4, retries=5)

    async def drain_instance(self, name: str) -> None:
        if name not in {instance.name for instance in self.plan.instances}:
            raise InvalidPlan("$.instances", f"no instance {name!r}")
        self.calls.append(f"drain {name}")

    async def add_instance(self, instance: Instance, worker: Worker) -> None:
        self.calls.append(f"add {instance.name} on {worker.name}")

    async def drain(self, timeout_s: float) -> None:
        self.calls.append(f"drain {timeout_s}")

    async def close(self) -> None:
        self.calls.append("close")


class Service:
    """An app around a fake engine, called without a socket."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        tokenizer: Tokenizer | None = None,
        operations: Operations | None = None,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.tokenizer = tokenizer or byte_level()
        self.app = create_app(self.engine, self.tokenizer, "tiny", drain_timeout_s=7, operations=operations)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.backend.encode(text).ids

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def call(self, method: str, path: str, **arguments: object) -> httpx.Response:
        async def one() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **arguments)  # type: ignore[arg-type]

        return asyncio.run(one())

    def complete(self, prompt: object, **more: object) -> httpx.Response:
        return self.call("POST", "/v1/completions", json={"model": "tiny", "prompt": prompt, **more})

    def chat(self, messages: object, **more: object) -> httpx.Response:
        return self.call("POST", "/v1/chat/completions", json={"model": "tiny", "messages": messages, **more})

    def metric(self, line: str) -> float:
        page = self.call("GET", "/metrics").text
        return next(float(row.rsplit(" ", 1)[1]) for row in page.splitlines() if row.startswith(line + " "))

    def outcomes(self) -> dict[str, int]:
        names = ("ok", "aborted", "failed", "rejected")
        counts = {name: int(self.metric(f'jdserve:requests_total{{outcome="{name}"}}')) for name in names}
        return {name: count for name, count in counts.items() if count}


def events(answer: httpx.Response) -> list[dict]:
    """The events of a stream, which must end with the end mark."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    parts = answer.text.removesuffix("\n\n").split("\n\n")[:-1]
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def assembled(chunks: list[dict]) -> dict[int, tuple[str, str | None]]:
    """Text and reason of each choice of a completion's chunks."""
    out: dict[int, tuple[str, str | None]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text, finish = out.get(choice["index"], ("", None))
            assert finish is None, "a choice went on after its end"
            out[choice["index"]] = (text + choice["text"], choice["finish_reason"])
    return out


@contextlib.asynccontextmanager
async def listening(service: Service) -> AsyncIterator[str]:
    """The service behind a real socket; its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # so that a client may connect before the server has come up
        server = uvicorn.Server(uvicorn.Config(service.app, log_level="critical"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
