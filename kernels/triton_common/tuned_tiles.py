"""Tile sizes that were tuned for one GPU, from a JSON file that a process reads once.

PENSTOCK_TUNED_TILES names a folder with one file per product, for example
`NVIDIA_H100_80GB_HBM3.json`; `python -m penstock.loadtests.gpu tuning` writes such files. Launchers
use their own tables if the variable is not set, the folder has no file for the GPU, or the file has
no entry for a shape. Batch-invariant kernels are not tuned, because their tiles determine the order
of sums.

A file has an object `tiles`. Its keys are names of KERNELS. Each value is an object by shape:

    {"tiles": {"attention.split_kv":
        {"width=128,group=4,itemsize=2,cached=2":
            {"rows": 16, "columns": 64, "num_warps": 4, "num_stages": 3}}}}
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from penstock.kernels.triton_common.launch import device_info, runs_kernels

log = logging.getLogger(__name__)

VARIABLE = "PENSTOCK_TUNED_TILES"

# tile sizes and launch options, by the field names of the launcher's `Tiles`
Sizes = Mapping[str, int]

_TILE = (16, 32, 64, 128, 256)
_LAUNCH = {"num_warps": (1, 2, 4, 8, 16), "num_stages": (1, 2, 3, 4, 5, 6, 7, 8)}


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """Shapes and tile sizes that a file may contain for a kernel."""

    shape: tuple[str, ...]  # names of the sizes that form the key of an entry in the file
    sizes: Mapping[str, tuple[int, ...]]  # allowed values of each tile size and launch option

    def key(self, shape: Sizes) -> str:
        """Return the key under which a file stores the tiles of a shape."""
        return ",".join(f"{name}={shape[name]}" for name in self.shape)


_ATTENTION = {"rows": _TILE[:4], "columns": _TILE, **_LAUNCH}
_MOE = {"rows": _TILE[:4], "outputs": (32, 64, 128, 256), "inputs": (32, 64, 128), **_LAUNCH}
_WEIGHT_ONLY = {"rows": _TILE[:4], "outputs": (32, 64, 128, 256), "inputs": (32, 64), **_LAUNCH}

KERNELS = {
    "attention.chunks": TunedKernel(("width", "itemsize", "cached"), _ATTENTION),
    "attention.split_kv": TunedKernel(("width", "group", "itemsize", "cached"), _ATTENTION),
    # `rows` is the number of rows of the launcher's own tiles, which depends on the mean number of
    # rows per expert (see `tiles_for` in `moe/triton.py`).
    "moe": TunedKernel(("experts", "size", "inner", "rows", "itemsize"), _MOE),
    # `kind` is a number of `linear/code_kinds`. `rows` is the number of rows of the launcher's own
    # tiles, 16 or 64.
    "linear.weight_only": TunedKernel(("kind", "one_group", "rows", "itemsize"), _WEIGHT_ONLY),
}

_trial: ContextVar[tuple[str, Sizes] | None] = ContextVar("trial", default=None)


def file_name(product: str) -> str:
    """Return the name of the file with the tuned tiles of a GPU, given its product name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", product) + ".json"


def tuned_tiles(product: str, kernel: str, **shape: int) -> Sizes | None:
    """Return the tuned tiles of a kernel for a shape.

    The result is None if there are none; the launcher then uses its own table.

    Args:
        product: `DeviceInfo.product`; if this is "", no tiles are tuned.
        kernel: a key of KERNELS.
        shape: the sizes that `KERNELS[kernel].shape` names.
    """
    if (trial := _trial.get()) is not None and trial[0] == kernel:
        return trial[1]
    tables = read_tuned_tiles(product)
    return tables.get((kernel, KERNELS[kernel].key(shape))) if tables else None


@contextmanager
def trial_tiles(kernel: str, sizes: Sizes) -> Iterator[None]:
    """Use `sizes` for all launches of a kernel within this context, for any shape."""
    token = _trial.set((kernel, sizes))
    try:
        yield
    finally:
        _trial.reset(token)


def load_tuned_tiles(device: torch.device) -> None:
    """Read and log the tuned tiles of a device now, so that an invalid file is an error at start.

    Raises:
        ValueError: see `read_tuned_tiles`.
    """
    if runs_kernels(device):
        tuned = read_tuned_tiles(device_info(torch.empty(0, device=device)).product)
        if tuned:
            log.info("kernels use %d tuned tile sizes of %s", len(tuned), os.environ[VARIABLE])


@lru_cache(maxsize=16)
def read_tuned_tiles(product: str) -> Mapping[tuple[str, str], Sizes]:
    """Return (kernel, key) -> tuned tiles for a product; empty if there are none.

    Raises:
        ValueError: the variable names no folder, or the file is invalid; the message is one line.
    """
    folder = os.environ.get(VARIABLE)
    if not folder or not product:
        return {}
    if not Path(folder).is_dir():
        raise ValueError(f"{VARIABLE}: {folder!r} is not a folder")
    path = Path(folder) / file_name(product)
    return parse(path) if path.exists() else {}


def parse(path: Path) -> dict[tuple[str, str], Sizes]:
    """Read and check a file. Raises ValueError with a message of one line."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    kernels = _object(found, str(path)).get("tiles")
    tables: dict[tuple[str, str], Sizes] = {}
    for kernel, entries in _object(kernels, f"{path}: tiles").items():
        where = f"{path}: tiles.{kernel}"
        if kernel not in KERNELS:
            raise ValueError(f"{where}: unknown kernel; expected one of {', '.join(KERNELS)}")
        for key, sizes in _object(entries, where).items():
            tables[kernel, key] = _checked(KERNELS[kernel], key, sizes, f"{where}[{key!r}]")
    return tables


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, not {type(value).__name__}")
    return value


def _checked(kernel: TunedKernel, key: str, sizes: Any, where: str) -> Sizes:
    pattern = ",".join(rf"{name}=[0-9]+" for name in kernel.shape)
    if not re.fullmatch(pattern, key):
        wanted = ",".join(f"{name}=N" for name in kernel.shape)
        raise ValueError(f"{where}: invalid shape; expected the form {wanted}")
    sizes = _object(sizes, where)
    if sizes.keys() != kernel.sizes.keys():
        raise ValueError(
            f"{where} has the keys {', '.join(sizes) or '(none)'}: expected exactly "
            f"{', '.join(kernel.sizes)}"
        )
    for name, allowed in kernel.sizes.items():
        value = sizes[name]
        if type(value) is not int or value not in allowed:
            values = ", ".join(map(str, allowed))
            raise ValueError(f"{where}.{name} is {value!r}: expected one of {values}")
    return dict(sizes)
