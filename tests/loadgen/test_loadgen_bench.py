"""The command, from its flags to its JSON."""

import argparse
import asyncio
import itertools
import json
import signal
import threading

import pytest
from fake_completions import answer
from tokenizers import Tokenizer, models, pre_tokenizers

from jdserve.loadgen import bench, prompts

LIMIT = ("--max-seconds", "60")  # ends a run that would hang
FIXED = ("--rate", "500", "--arrivals", "fixed", "--input-len", "7", "--output-len", "3", *LIMIT)


def call(*flags):
    parser = argparse.ArgumentParser(prog="jdserve bench")
    parser.set_defaults(command="bench")  # a roof's own default must not leak into the report
    bench.add_arguments(parser)
    return bench.main(parser.parse_args([str(flag) for flag in flags]))


@pytest.fixture
def tokenizing(server):
    server.tokens = list(range(1000, 1050))
    return server


def test_end_to_end(tokenizing, tmp_path, capsys):
    output = tmp_path / "out.json"
    flags = ("--url", tokenizing.url + "/v1/", "--num-requests", 20, "--slo-ttft", 60, "--slo-tpot", 60)
    assert call(*FIXED, *flags, "--output", output) == 0
    report = json.loads(output.read_bytes())
    assert report["version"] == 1
    assert report["settings"]["url"] == tokenizing.url
    assert report["settings"]["model"] == "tiny"
    assert report["settings"]["rate"] == 500
    assert "command" not in report["settings"]
    summary = report["summary"]
    assert (summary["completed"], summary["failed"], summary["unsent"]) == (20, 0, 0)
    assert (summary["other_input_len"], summary["other_output_len"]) == (0, 0)
    assert summary["attainment"] == {"joint": 1.0, "ttft": 1.0, "tpot": 1.0}
    assert summary["offered_rate"] == pytest.approx(500)
    assert len(report["requests"]) == 20
    row = report["requests"][3]
    assert row["record"]["scheduled"] == pytest.approx(3 / 500)
    assert row["ttft"] == pytest.approx(row["record"]["chunks"][0] - row["record"]["scheduled"])
    assert row["tpot"] == pytest.approx((row["record"]["ended"] - row["record"]["chunks"][0]) / 2)
    assert {len(body["prompt"]) for body in tokenizing.requests} == {7}
    assert {body["max_tokens"] for body in tokenizing.requests} == {3}
    assert all(body["ignore_eos"] for body in tokenizing.requests)
    table = capsys.readouterr().out
    assert "TTFT" in table
    assert "100.00%" in table


def prompts_of(server, *flags):
    server.requests.clear()
    assert call("--url", server.url, "--num-requests", 30, *FIXED, *flags) == 0
    return sorted(body["prompt"] for body in server.requests)


def test_the_seed_decides_the_prompts(tokenizing):
    first = prompts_of(tokenizing, "--seed", 3)
    assert first == prompts_of(tokenizing, "--seed", 3)
    assert first != prompts_of(tokenizing, "--seed", 4)
    assert len({tuple(prompt) for prompt in first}) == 30


def test_the_seed_decides_the_arrivals(tokenizing, tmp_path):
    def scheduled(seed):
        output = tmp_path / "out.json"
        flags = ("--input-len", 1, "--output-len", 1, "--num-requests", 10, "--rate", 1000, "--seed", seed, *LIMIT)
        assert call("--url", tokenizing.url, *flags, "--output", output) == 0
        return [row["record"]["scheduled"] for row in json.loads(output.read_bytes())["requests"]]

    assert scheduled(1) == scheduled(1)
    assert scheduled(1) != scheduled(2)


def test_a_trace_gives_lengths_and_arrivals(tokenizing, tmp_path):
    trace, output = tmp_path / "t.csv", tmp_path / "out.json"
    trace.write_text("arrival_s,input_len,output_len\n100,40,6\n101,20,4\n103,60,2\n104,2,2\n")
    flags = ("--arrivals", "trace", "--trace", trace, "--speed", 100, "--length-divisor", 2, "--num-requests", 3)
    assert call("--url", tokenizing.url, *flags, *LIMIT, "--output", output) == 0
    records = [row["record"] for row in json.loads(output.read_bytes())["requests"]]
    assert [record["scheduled"] for record in records] == pytest.approx([0, 0.01, 0.03])
    assert [(record["prompt_tokens"], record["output_tokens"]) for record in records] == [(20, 3), (10, 2), (30, 1)]


def test_a_local_tokenizer_and_text(server, tmp_path):
    vocabulary = {"[UNK]": 0, "red": 1, "green": 2, "blue": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("red green blue")
    flags = ("--tokenizer", tmp_path, "--text", tmp_path / "text.txt", "--num-requests", 3, "--model", "other")
    assert call("--url", server.url, *FIXED, *flags) == 0
    turns = [list(itertools.islice(itertools.cycle(turn), 7)) for turn in ([1, 2, 3], [2, 3, 1], [3, 1, 2])]
    assert sorted(body["prompt"] for body in server.requests) == turns
    assert {body["model"] for body in server.requests} == {"other"}


def test_respect_eos_lets_answers_end_early(tokenizing, capsys):
    async def short(reply):
        await reply.head()
        await reply.token(finish="stop")
        await reply.end(output_tokens=1)

    tokenizing.script = short
    assert call("--url", tokenizing.url, "--num-requests", 2, "--respect-eos", *FIXED) == 0
    assert all("ignore_eos" not in body for body in tokenizing.requests)
    assert "answers of another length │ 2" in " ".join(capsys.readouterr().out.split()).replace("   ", " ")


def test_failures_are_counted_and_missed(tokenizing, tmp_path):
    async def odd_fail(reply):
        if reply.index % 2:
            await reply.head(500)
        else:
            await answer(reply)

    tokenizing.script = odd_fail
    output = tmp_path / "out.json"
    flags = ("--url", tokenizing.url, "--num-requests", 8, "--slo-ttft", 60, "--output", output)
    assert call(*FIXED, *flags) == 0
    summary = json.loads(output.read_bytes())["summary"]
    assert (summary["completed"], summary["failed"], summary["errors"]) == (4, 4, {"HTTP 500: ": 4})
    assert summary["attainment"]["joint"] == 0.5


def test_exit_code_one_when_nothing_was_answered(tokenizing):
    async def fail(reply):
        await reply.head(500)

    tokenizing.script = fail
    assert call("--url", tokenizing.url, "--num-requests", 2, *FIXED) == 1


@pytest.fixture
def interruptible():
    """Python's own SIGINT handler: a shell that runs the tests in the background has the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_reports_what_was_done(tokenizing, tmp_path):
    answered = asyncio.Semaphore(0)

    async def interrupt_at_third(reply):
        if reply.index < 2:
            await answer(reply)
            await reply.read_to_the_end()
            answered.release()
            return
        await answered.acquire()
        await answered.acquire()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await asyncio.Event().wait()

    tokenizing.script = interrupt_at_third
    trace, output = tmp_path / "t.csv", tmp_path / "out.json"
    trace.write_text("arrival_s,input_len,output_len\n0,4,2\n0,4,2\n0,4,2\n9999,4,2\n")
    flags = ("--arrivals", "trace", "--trace", trace, "--output", output, *LIMIT)
    assert call("--url", tokenizing.url, *flags) == 130
    summary = json.loads(output.read_bytes())["summary"]
    assert (summary["completed"], summary["cut_off"], summary["unsent"]) == (2, 1, 1)


def one_line(capsys):
    line = capsys.readouterr().err
    assert line.startswith("jdserve bench: ")
    assert line.count("\n") == 1
    return line


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid:80"])
def test_an_unreachable_server_is_one_line(url, capsys):
    assert call("--url", url, *FIXED) == 2
    assert f"--url: cannot reach {url}/v1/models" in one_line(capsys)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://:80"])
def test_a_wrong_url_is_one_line(url, capsys):
    assert call("--url", url, *FIXED) == 2
    assert "--url: must be http://HOST[:PORT]" in one_line(capsys)


def test_a_malformed_url_is_one_line(capsys):
    assert call("--url", "http://[::", *FIXED) == 2
    assert "--url: Invalid" in one_line(capsys)


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_the_model_must_be_named_unless_there_is_one(tokenizing, names, capsys):
    tokenizing.models = names
    assert call("--url", tokenizing.url, *FIXED) == 2
    assert "--model: needed" in one_line(capsys)


def test_a_tokenizer_is_needed_where_the_server_offers_none(server, capsys):
    assert call("--url", server.url, *FIXED) == 2
    assert "--tokenizer: needed for exact prompt lengths" in one_line(capsys)


@pytest.mark.parametrize(
    ("flag", "value", "bound"),
    [
        *(("--rate", value, "must be a finite number above 0") for value in ("0", "-1", "nan", "inf", "x")),
        *(("--num-requests", value, "must be a whole number of at least 1") for value in ("0", "-5", "1.5")),
        ("--input-len", "-1", "must be a whole number of at least 1"),
        ("--output-len", "0", "must be a whole number of at least 1"),
        ("--seed", "-1", "must be a whole number of at least 0"),
        ("--speed", "0", "must be a finite number above 0"),
        ("--length-divisor", "0.5", "must be a finite number of at least 1"),
        ("--slo-ttft", "0", "must be a finite number above 0"),
        ("--slo-tpot", "nan", "must be a finite number above 0"),
        ("--max-seconds", "-1", "must be a finite number above 0"),
    ],
)
def test_bad_numbers_name_the_flag_and_the_bound(flag, value, bound, capsys):
    with pytest.raises(SystemExit) as stop:
        call(f"{flag}={value}")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert flag in error
    assert bound in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--input-len: needed without --trace"),
        (("--input-len", 1), "--output-len: needed without --trace"),
        (("--input-len", 1, "--output-len", 1), "--rate: needed with --arrivals poisson"),
        (("--input-len", 1, "--output-len", 1, "--arrivals", "fixed"), "--rate: needed with --arrivals fixed"),
        (("--input-len", 1, "--output-len", 1, "--arrivals", "trace"), "--arrivals trace: needs a --trace"),
        (("--trace", "lengths.csv", "--arrivals", "trace"), "--arrivals trace: needs a --trace with the column"),
        (("--trace", "lengths.csv", "--input-len", 1), "--input-len: must not be given with --trace"),
        (
            ("--trace", "full.csv", "--arrivals", "trace", "--rate", 1),
            "--rate: must not be given with --arrivals trace",
        ),
        (("--trace", "full.csv", "--rate", 1, "--speed", 1), "--speed: must not be given without --arrivals trace"),
        (("--input-len", 1, "--output-len", 1, "--length-divisor", 2), "--length-divisor: must not be given without"),
        (("--trace", "empty.csv", "--rate", 1), "must have at least 1 row, got 0"),
        (("--trace", "full.csv", "--rate", 1, "--num-requests", 2), "has 1 rows, 2 were asked for"),
        ((*FIXED, "--output", "none/out.json"), "--output: the folder of none/out.json must exist"),
        ((*FIXED, "--text", "none.txt"), "--text: cannot read none.txt"),
    ],
)
def test_flags_that_do_not_go_together(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.csv").write_text("input_len,output_len\n1,1\n")
    (tmp_path / "full.csv").write_text("input_len,output_len,arrival_s\n1,1,0\n")
    (tmp_path / "empty.csv").write_text("input_len,output_len\n")
    assert call("--url", "http://127.0.0.1:1", *flags) == 2
    assert message in one_line(capsys)


def test_the_packaged_text_is_the_default(tokenizing, monkeypatch):
    asked = []
    monkeypatch.setattr(bench.endpoint, "tokenize", lambda url, model, text: asked.append((model, text)) or [1, 2])
    assert call("--url", tokenizing.url, "--num-requests", 1, *FIXED) == 0
    assert asked == [("tiny", prompts.read_text())]
