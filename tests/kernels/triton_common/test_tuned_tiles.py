"""Tuned tiles: launchers read the file for the GPU in use; a bad file gives a clear error."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels.attention.triton_configs import (
    Tiles,
    batch_invariant_tiles,
    chunk_tiles,
    split_kv_tiles,
)
from penstock.kernels.linear import triton_quantized as weight_only
from penstock.kernels.moe import triton as moe
from penstock.kernels.triton_common import tuned_tiles as module
from penstock.kernels.triton_common.launch import DeviceInfo, record_launches
from penstock.kernels.triton_common.tuned_tiles import (
    KERNELS,
    VARIABLE,
    file_name,
    read_tuned_tiles,
    trial_tiles,
    tuned_tiles,
)
from penstock.workers.config import WorkerConfig
from penstock.workers.rank.rank_runtime import load_rank

PRODUCT = "NVIDIA H100 80GB HBM3"
CHIP = DeviceInfo("sm_90", 227 << 10, product=PRODUCT)
SPLIT_KV = {"rows": 16, "columns": 128, "num_warps": 2, "num_stages": 4}
MOE = {"rows": 32, "outputs": 64, "inputs": 128, "num_warps": 8, "num_stages": 5}
SHAPE = "width=128,group=4,itemsize=2,cached=2"


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    read_tuned_tiles.cache_clear()
    yield
    read_tuned_tiles.cache_clear()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path / "NVIDIA_H100_80GB_HBM3.json"


def write(path: Path, kernel: str, key: str, sizes: Any) -> None:
    path.write_text(json.dumps({"tiles": {kernel: {key: sizes}}}))


def test_launchers_use_the_tiles_of_the_file_for_its_shape_only(path: Path) -> None:
    default = split_kv_tiles(CHIP, 128, 2, 8, 2), chunk_tiles(CHIP, 128, 2, 2)
    fixed = batch_invariant_tiles(CHIP, 128, 2, 2)
    write(path, "attention.split_kv", SHAPE, SPLIT_KV)
    read_tuned_tiles.cache_clear()
    assert split_kv_tiles(CHIP, 128, 2, 4, 2) == Tiles(16, 128, 2, 4)
    assert (split_kv_tiles(CHIP, 128, 2, 8, 2), chunk_tiles(CHIP, 128, 2, 2)) == default
    assert batch_invariant_tiles(CHIP, 128, 2, 2) == fixed
    other = DeviceInfo("sm_90", 227 << 10, product="NVIDIA H200")
    assert split_kv_tiles(other, 128, 2, 4, 2) != Tiles(16, 128, 2, 4)


def test_experts_use_the_tiles_of_their_shape(path: Path) -> None:
    write(path, "moe", "experts=8,size=64,inner=32,rows=16,itemsize=2", MOE)
    x = torch.empty(4, 64, dtype=torch.bfloat16, device="meta")
    down = torch.empty(8, 32, 64, dtype=torch.bfloat16, device="meta")
    with record_launches(CHIP):
        assert moe.tuned_for(x, down, moe.FEW) == moe.Tiles(**MOE)
        assert moe.tuned_for(x, down, moe.SOME) == moe.SOME


def test_weight_only_products_use_the_tiles_of_their_codes_and_rows(path: Path) -> None:
    tiles = {"rows": 32, "outputs": 128, "inputs": 32, "num_warps": 8, "num_stages": 4}
    write(path, "linear.weight_only", "kind=2,one_group=1,rows=16,itemsize=2", tiles)

    def codes(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device="meta")

    def used(kind: int, num_rows: int) -> tuple[int, ...]:
        with record_launches(CHIP) as launches:
            weight_only.quantized_matmul_triton(
                torch.empty(num_rows, 256, dtype=torch.bfloat16, device="meta"),
                codes(300, 256),
                torch.empty(300, 2, device="meta"),
                codes(300, 0),
                torch.empty(256, dtype=torch.int32, device="meta"),
                None,
                kind,
                one_group=True,
            )
        options = launches[0].options
        names = ("TILE_ROWS", "TILE_OUTPUTS", "TILE_INPUTS", "num_warps", "num_stages")
        return tuple(options[name] for name in names)

    assert used(weight_only.FP8, 16) == (32, 128, 32, 8, 4)
    assert used(weight_only.FP8, 17) == (64, 64, 64, 4, 3)
    assert used(weight_only.INT8, 16) == (16, 64, 64, 4, 3)


def test_file_is_read_once(path: Path) -> None:
    write(path, "attention.split_kv", SHAPE, SPLIT_KV)
    assert len(read_tuned_tiles(PRODUCT)) == 1
    path.unlink()
    assert len(read_tuned_tiles(PRODUCT)) == 1


def test_without_variable_file_or_product_nothing_is_tuned(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_tuned_tiles(PRODUCT) == {}
    write(path, "attention.split_kv", SHAPE, SPLIT_KV)
    assert read_tuned_tiles("") == {}
    monkeypatch.delenv(VARIABLE)
    read_tuned_tiles.cache_clear()
    assert read_tuned_tiles(PRODUCT) == {}


def test_tiles_on_trial_precede_those_of_the_file(path: Path) -> None:
    write(path, "attention.split_kv", SHAPE, SPLIT_KV)
    with trial_tiles("attention.split_kv", {**SPLIT_KV, "columns": 32}):
        assert split_kv_tiles(CHIP, 128, 2, 4, 2).columns == 32
        assert tuned_tiles(PRODUCT, "attention.chunks", width=1, itemsize=2, cached=2) is None
    assert split_kv_tiles(CHIP, 128, 2, 4, 2).columns == 128


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON: "),
        ("[]", "expected a JSON object, not list"),
        ("{}", "tiles: expected a JSON object, not NoneType"),
        (
            '{"tiles": {"gemm": {}}}',
            "tiles.gemm: unknown kernel; expected one of attention.chunks, ",
        ),
        ('{"tiles": {"moe": 3}}', "tiles.moe: expected a JSON object, not int"),
        (
            '{"tiles": {"attention.chunks": {"width=64": {}}}}',
            "['width=64']: invalid shape; expected the form width=N,itemsize=N,cached=N",
        ),
        (
            json.dumps({"tiles": {"attention.split_kv": {SHAPE: {"rows": 16}}}}),
            f"[{SHAPE!r}] has the keys rows: expected exactly rows, columns, num_warps, num_stages",
        ),
        (
            json.dumps({"tiles": {"attention.split_kv": {SHAPE: {**SPLIT_KV, "columns": 48}}}}),
            f"[{SHAPE!r}].columns is 48: expected one of 16, 32, 64, 128, 256",
        ),
        (
            json.dumps({"tiles": {"attention.split_kv": {SHAPE: {**SPLIT_KV, "num_warps": True}}}}),
            f"[{SHAPE!r}].num_warps is True: expected one of 1, 2, 4, 8, 16",
        ),
    ],
)
def test_invalid_file_has_an_error_of_one_line(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_tuned_tiles(PRODUCT)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_missing_folder_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"PENSTOCK_TUNED_TILES: '.*absent' is not a folder"):
        read_tuned_tiles(PRODUCT)


def test_a_worker_reads_the_file_at_its_start(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "runs_kernels", lambda device: True)
    path = path.with_name("interpreter.json")
    write(path, "attention.split_kv", SHAPE, SPLIT_KV)
    with caplog.at_level("INFO"):
        module.load_tuned_tiles(torch.device("cpu"))
    assert f"kernels use 1 tuned tile sizes of {path.parent}" in caplog.text
    read_tuned_tiles.cache_clear()
    path.write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        load_rank(WorkerConfig(name="w", model=path.parent, device="cpu"), lambda *_: None, None)


def test_default_tiles_are_allowed_in_a_file() -> None:
    for kernel, tiles in (
        ("attention.chunks", chunk_tiles(CHIP, 128, 2, 2)),
        ("attention.split_kv", split_kv_tiles(CHIP, 128, 2, 4, 2)),
    ):
        allowed = KERNELS[kernel].sizes
        assert all(value in allowed[name] for name, value in tiles._asdict().items())
    for kernel, known in (
        ("moe", (moe.FEW, moe.SOME, moe.MANY)),
        (
            "linear.weight_only",
            [
                weight_only.tiles_for(dtype, rows, one_group)
                for dtype in (torch.float32, torch.bfloat16)
                for rows in (1, 17)
                for one_group in (False, True)
            ],
        ),
    ):
        allowed = KERNELS[kernel].sizes
        for each in known:
            assert all(value in allowed[name] for name, value in asdict(each).items())
    assert file_name("NVIDIA RTX 6000 Ada/x") == "NVIDIA_RTX_6000_Ada_x.json"
