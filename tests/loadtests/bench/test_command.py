"""`penstock bench` from its flags to its exit code, against stub servers."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.loadtests.bench.command import main
from penstock.loadtests.bench.workload import TRACE_BLOCK
from tests.support.api_keys import key_file
from tests.support.serving import INTERRUPTIBLE
from tests.support.stub_servers import Behaviour, grpc_stub, http_stub

SMALL = ["--num-requests", "12", "--input-len", "16-32", "--output-len", "4", "--concurrency", "3"]
HTTP = ["--vocab-size", "1000"]


def shown(text: str, label: str) -> float:
    found = re.search(rf"^{re.escape(label)}\s+([\d.]+)\s*$", text, re.MULTILINE)
    assert found, f"{label} is not in:\n{text}"
    return float(found[1])


def messages_of(errors: str) -> str:
    """Return stderr without warnings about a late client, because a busy machine can cause them."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("this client was late"))


@pytest.mark.parametrize("api", ["grpc", "completions", "chat"])
def test_load_is_sent_and_its_figures_are_printed_and_saved(
    api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour, saved = Behaviour(per_message=2), tmp_path / "o.json"
    flags = [*SMALL, *HTTP, "--api", api, "--save-json", str(saved), "--save-rows"]
    flags += ["--api-key-file", str(key_file(tmp_path, "secret-key")), "--goodput", "ttft:60000"]
    with (grpc_stub if api == "grpc" else http_stub)(behaviour) as address:
        assert main([address, *flags]) == 0
    captured = capsys.readouterr()
    assert messages_of(captured.err) == ""  # without a terminal, there is no progress bar
    assert shown(captured.out, "Successful requests:") == 12
    assert shown(captured.out, "Failed requests:") == 0
    assert shown(captured.out, "Maximum request concurrency:") == 3
    assert shown(captured.out, "Total generated tokens:") == 48
    assert shown(captured.out, "Request goodput (req/s):") > 0
    assert behaviour.max_in_flight <= 3
    assert len(behaviour.prompts) == 13  # 12 requests and the warm-up request
    result = json.loads(saved.read_text())
    assert (result["completed"], result["total_output_tokens"]) == (12, 48)
    assert result["config"]["work"]["input_len"] == "16-32"
    assert result["config"]["served"]["model"] == "stub"
    assert "secret-key" not in saved.read_text()
    assert [len(row["itls"]) for row in result["requests"]] == [1] * 12
    assert sum(row["input_len"] for row in result["requests"]) == result["total_input_tokens"]


def test_results_may_contain_the_word_infinity_and_infinite_numbers(tmp_path: Path) -> None:
    saved = tmp_path / "Infinity.json"
    with grpc_stub(Behaviour()) as address:
        assert main([address, *SMALL, "--rate", "inf", "--save-json", str(saved)]) == 0
    config = json.loads(saved.read_text())["config"]
    assert config["results"]["save_json"] == str(saved)
    assert config["work"]["rate"] == "inf"


def test_failures_are_counted_and_fail_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with grpc_stub(Behaviour(refuse=3)) as address:
        assert main([address, *SMALL, "--num-warmups", "0"]) == 1
        captured = capsys.readouterr()
        assert main([address, *SMALL, "--num-warmups", "0", "--allow-failures"]) == 0
    assert shown(captured.out, "Successful requests:") == 8
    assert shown(captured.out, "Failed requests:") == 4
    assert messages_of(captured.err) == "failed, 4 times: RESOURCE_EXHAUSTED: the queue is full\n"


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_repeated_server_failure_is_reported_once_with_its_count(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = grpc_stub if kind == "grpc" else http_stub
    with stub(Behaviour(break_after=2)) as address:
        assert main([address, *SMALL, *HTTP, "--num-warmups", "0"]) == 1
    captured = capsys.readouterr()
    assert shown(captured.out, "Successful requests:") == 0
    assert shown(captured.out, "Mean TTFT (ms):") == 0
    assert messages_of(captured.err).count("\n") == 1
    assert "12 times" in captured.err
    assert "the server went away" in captured.err


def test_short_answers_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with grpc_stub(Behaviour(shorter_by=1)) as address:
        assert main([address, *SMALL]) == 0
    assert "12 answers were shorter than requested" in capsys.readouterr().err


def test_trace_is_replayed_with_its_lengths_and_prefixes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(0, 600, [1, 2]), (10, 1024, [1, 2]), (20, 600, [1, 3])]
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": n, "output_length": 99, "hash_ids": ids})
            + "\n"
            for at, n, ids in rows
        )
    )
    behaviour = Behaviour()
    with grpc_stub(behaviour) as address:
        flags = ["--trace", str(trace), "--max-output-len", "3", "--num-warmups", "0"]
        assert main([address, *flags]) == 0
    assert shown(capsys.readouterr().out, "Total generated tokens:") == 9
    by_length = sorted(behaviour.prompts, key=len)
    assert [len(prompt) for prompt in by_length] == [600, 600, 1024]
    assert len({tuple(prompt[:TRACE_BLOCK]) for prompt in by_length}) == 1
    assert len({tuple(prompt[:600]) for prompt in by_length}) == 2
    assert tuple(by_length[2][:600]) in {tuple(prompt) for prompt in by_length[:2]}


def test_load_beyond_the_context_length_is_refused_before_it_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    behaviour = Behaviour(max_model_len=100)
    with grpc_stub(behaviour) as address:
        assert main([address, "--input-len", "90", "--output-len", "11"]) == 2
    assert "have 101 tokens, but stub accepts at most 100" in capsys.readouterr().err
    assert behaviour.prompts == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "expected grpc://HOST:PORT"),
        (["--rate", "-1"], "--rate must be"),
        (["--trace", "/nonexistent/trace"], "No such file"),
    ],
)
def test_wrong_options_give_a_one_line_error(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"penstock bench: .*{re.escape(message)}.*\n", captured.err)


def test_http_requires_the_vocabulary_size(capsys: pytest.CaptureFixture[str]) -> None:
    with http_stub(Behaviour()) as address:
        assert main([address, *SMALL]) == 2
    assert "add --vocab-size" in capsys.readouterr().err


def test_unreachable_server_gives_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    with grpc_stub(Behaviour(hang=True)) as address:
        assert main([address, *SMALL, "--timeout", "0.2"]) == 1
    assert "the warm-up request failed: DEADLINE_EXCEEDED" in capsys.readouterr().err
    assert main([address, *SMALL]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.process
def test_ctrl_c_prints_the_figures_so_far() -> None:
    behaviour = Behaviour()
    with grpc_stub(behaviour) as address:
        command = [sys.executable, "-m", "penstock.loadtests.bench.command", address]
        flags = ["--num-requests", "100000", "--output-len", "2", "--concurrency", "2"]
        process = subprocess.Popen(
            [*INTERRUPTIBLE, *command, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            deadline = time.monotonic() + 60
            while len(behaviour.prompts) < 20 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert shown(out, "Successful requests:") >= 10
    assert shown(out, "Failed requests:") == 0
    assert "interrupted: " in err
    assert "Traceback" not in err
