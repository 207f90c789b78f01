"""Comparison of variants of CPU operations, whose results must agree."""

import pytest
import torch

from penstock.loadtests.micro import cpu_ops


def test_every_operation_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    try:
        assert cpu_ops.main(["--small", "--rounds", "1"]) == 0
    finally:
        torch.set_num_threads(before)
    output = capsys.readouterr().out
    for name in ("decodes of", "first chunk of", "cache write", "RMS norm", "rotation", "noise"):
        assert name in output


def test_variants_that_disagree_raise_an_error() -> None:
    operation = cpu_ops.Operation(
        "x", {"one": lambda: torch.zeros(3), "other": lambda: torch.ones(3)}
    )
    with pytest.raises(AssertionError, match="not close"):
        cpu_ops.least_ms(operation, 1)
