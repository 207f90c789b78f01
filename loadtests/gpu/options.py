"""What every section is told."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Options:
    device: torch.device
    json: Path  # where its figures go
    bounds: Path | None  # where the figures of the bounds are
    model: str  # of the engine's section
    small: bool  # sizes that a CPU computes in a moment, to try the command itself

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def read_options(section: str, arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog=f"python -m penstock.loadtests.gpu.{section}")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--bounds", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args(arguments)
    return Options(given.device, given.json, given.bounds, given.model, given.small)
