"""Command-line options of all sections."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Options:
    """Command-line options of one section."""

    device: torch.device
    json: Path  # output file for the section's results
    bounds: Path | None  # result file of the bounds section, or None
    model: str  # key of SHAPES for the sections that run an engine
    small: bool  # whether to use tiny sizes, with which a CPU can test the command
    folder: Path | None = None  # existing folder for further result files, such as JSON lines

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def read_options(section: str, arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line of a section."""
    parser = argparse.ArgumentParser(prog=f"python -m penstock.loadtests.gpu.{section}")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--bounds", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args(arguments)
    return Options(given.device, given.json, given.bounds, given.model, given.small, given.folder)
