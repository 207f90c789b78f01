"""The command that compares forms of CPU operations: they agree, and the served one comes first."""

import pytest
import torch

from penstock.loadtests.micro import cpu_ops


def test_every_operation_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    try:
        assert cpu_ops.main(["--small", "--rounds", "1"]) == 0
    finally:
        torch.set_num_threads(before)
    said = capsys.readouterr().out
    for name in ("decodes of", "a chunk of", "cache write", "RMS norm", "rotation", "noise"):
        assert name in said


def test_forms_that_disagree_are_not_compared() -> None:
    wrong = cpu_ops.Operation("x", {"one": lambda: torch.zeros(3), "other": lambda: torch.ones(3)})
    with pytest.raises(AssertionError, match="not close"):
        cpu_ops.least_ms(wrong, 1)
