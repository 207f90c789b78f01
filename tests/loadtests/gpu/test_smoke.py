"""The section "smoke" of `make gpu` finds errors, and continues after a failure, crash or hang."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.loadtests.gpu import smoke
from penstock.loadtests.gpu.options import Options
from penstock.loadtests.gpu.smoke import figures_of, read_lines, relative_error, run_group, watch
from penstock.loadtests.gpu.smoke_cases import EXACT, GROUPS
from penstock.loadtests.gpu.smoke_inputs import Case, Inputs

CPU = torch.device("cpu")
OPTIONS = Options(CPU, Path("unused"), None, "", small=True)
STUB = """
import json, os, sys, time
words = sys.argv[1:]
given = dict(zip(words[::2], words[1::2]))
with open(given["--json"], "a") as file:
    for number in range(int(given["--skipped"]), 4):
        line = {"case": f"stub: {number}", "dtype": given["--dtype"], "number": number}
        file.write(json.dumps(line | {"outcome": "started"}) + "\\n")
        file.flush()
        if number == 1:
            print("the reason", file=sys.stderr, flush=True)
            os._exit(3)
        if number == 2:
            time.sleep(100)
        file.write(json.dumps(line | {"outcome": "passed", "error": 0.0}) + "\\n")
        file.flush()
if given["--group"] == "broken":
    sys.exit(5)
"""


def cases(inputs: Inputs) -> Iterator[Case]:
    exact = torch.arange(8.0)
    yield "fine", lambda: (exact.to(inputs.dtype), exact)
    yield "wrong", lambda: (exact.to(inputs.dtype).flip(0), exact)
    yield "unwritten", lambda: (torch.full((8,), torch.nan), exact)
    yield "raises", lambda: (exact[9], exact)
    yield "fine again", lambda: (exact, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_case_has_a_line_before_and_after_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(GROUPS, "own", cases)
    lines = list(run_group("own", Inputs(CPU, dtype, small=True), skipped=0))
    assert [line["outcome"] for line in lines[::2]] == ["started"] * 5
    outcomes = [line["outcome"] for line in lines[1::2]]
    assert outcomes == ["passed", "failed", "failed", "failed", "passed"]
    assert "IndexError" in lines[7]["why"]
    assert len(list(run_group("own", Inputs(CPU, dtype, small=True), skipped=3))) == 4
    path = tmp_path / "lines"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    failures = figures_of([], [path])["failures"]
    assert [failure.partition(",")[0] for failure in failures] == [
        "own: wrong",
        "own: unwritten",
        "own: raises",
    ]


def test_error_is_relative_to_the_exact_result() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert not relative_error(torch.tensor([torch.nan, 4.0]), exact) < 1


def test_a_rounded_result_is_within_the_limit_and_a_lost_tile_is_not() -> None:
    exact = torch.randn(64, 64, dtype=torch.float64)
    for dtype, limit in smoke.LIMITS.items():
        assert relative_error(exact.to(dtype), exact) < limit
        lost = exact.to(dtype)
        lost[:16, :16] = 0
        assert relative_error(lost, exact) > limit


def test_groups_that_must_be_exact_exist() -> None:
    assert {*EXACT} < {*GROUPS}


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stub_group.py").write_text(STUB.replace("\\\\", "\\"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "lines"


@pytest.mark.slow
def test_cases_behind_a_crash_or_a_hang_run(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "INTERPRETED_CASE_SECONDS", 8.0)
    watch("any", "float32", OPTIONS, stub, time.monotonic() + 200, "stub_group")
    ended = [line for line in read_lines(stub) if line["outcome"] != "started"]
    assert [line["outcome"] for line in ended] == ["passed", "failed", "failed", "passed"]
    assert ended[1]["why"] == "exited with code 3: the reason\n"
    assert ended[2]["why"].startswith("hung for 8 s")


@pytest.mark.process
def test_a_crash_outside_of_a_case_is_a_failure(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.write_text(
        json.dumps({"number": 2, "outcome": "passed", "case": "a", "dtype": "b"}) + "\n"
    )
    watch("broken", "float32", OPTIONS, stub, time.monotonic() + 200, "no_such_module")
    (failure,) = figures_of([], [stub])["failures"]
    assert failure.startswith("broken: process, float32: exited with code 1")


def test_complaints_fail_only_if_a_kernel_does_not_compile() -> None:
    def compiled(*complaints: str) -> dict[str, Any]:
        return {"kernel": "k", "case": "c", "complaints": [*complaints]}

    found = figures_of(
        [compiled("spills: 8 bytes"), compiled("does not compile: x"), compiled()], []
    )
    assert found["compiled"] == 3
    assert found["complaints"] == ["k (c): spills: 8 bytes", "k (c): does not compile: x"]
    assert found["failures"] == ["k (c): does not compile: x", "no case passed"]
