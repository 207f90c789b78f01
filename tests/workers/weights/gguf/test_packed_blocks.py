"""Blocks of Q8_0 and Q4_0 that stay packed give the same weights and answers as floats."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.common.gguf.checkpoint import open_gguf
from penstock.kernels.cpu_common.cpu_features import has_avx2
from penstock.kernels.linear.quantized import (
    DequantizingLinear,
    QuantizedMatrix,
    TiledLinear,
    pack_quantized,
)
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.layers.linear import Linear
from penstock.workers.models.config import BadCheckpoint
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.spec import read_spec
from penstock.workers.parallel.mesh import Mesh
from penstock.workers.weights import loading, quantized_method
from penstock.workers.weights.gguf import loading_log, packed_blocks
from penstock.workers.weights.gguf.packed_blocks import has_packable_blocks, keeps_blocks
from penstock.workers.weights.gguf.tensors import GgufEntry
from penstock.workers.weights.loading import load_model
from penstock.workers.weights.sharding import regions
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import run_greedy
from tests.support.gguf_files import make_gguf, stored_tensors, write_gguf
from tests.workers.weights.gguf.test_tensors import weights
from tests.workers.weights.test_sharding import ranks_of, region_mask

CPU, FLOAT32 = torch.device("cpu"), torch.float32
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj",
            "gate_up_proj")  # fmt: skip


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep blocks packed on every CPU. Without AVX-512, torch then multiplies dequantized tiles."""
    monkeypatch.setattr(packed_blocks, "has_weight_only_kernel", lambda *args: True)


@pytest.fixture
def held(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the codes of all layers as they were loaded."""

    def hold(
        matrix: QuantizedMatrix, bias: Tensor | None, dtype: torch.dtype, int8_activations: bool
    ) -> TiledLinear:
        return TiledLinear(matrix, bias)

    monkeypatch.setattr(quantized_method, "pack_quantized", hold)


def packed_linears(decoder: Decoder) -> Iterator[tuple[tuple[str, ...], Linear, TiledLinear]]:
    for names, linear in decoder.linears():
        if isinstance(linear.packed, TiledLinear):
            yield tuple(names), linear, linear.packed


def matrices(decoder: Decoder) -> dict[str, Tensor]:
    """Dequantize the weights that stay packed; return them by their tensor names."""
    found: dict[str, Tensor] = {}
    for names, linear, packed in packed_linears(decoder):
        rows = torch.split(packed.matrix.dequantize(), linear.module_sizes(names))
        found |= {f"{name}.weight": part for name, part in zip(names, rows, strict=True)}
    return found


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1)])
@pytest.mark.parametrize("family", ["llama2", "llama3", "qwen2", "gemma2", "phi3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_packed_weights_of_every_rank_equal_the_dequantized_ones(
    kind: str, family: str, shape: tuple[int, int, int], tmp_path: Path, held: None
) -> None:
    path, mesh = make_gguf(tmp_path / "m", family, kind), Mesh(*shape)
    spec, expected = read_spec(path), weights(path)
    found_names = set()
    for rank in range(mesh.num_ranks):
        coord = mesh.coord(rank)
        cuts = regions(spec, coord)
        _, decoder = load_model(path, "float32", CPU, ranks=ranks_of(coord))
        for name, found in matrices(decoder).items():
            whole = expected[name]
            part = whole[region_mask(whole, cuts.get(name, ()))]
            assert torch.equal(found, part.view(found.shape)), name
            found_names.add(name)
    is_matrix = ("lm_head.weight", *(f"{name}.weight" for name in MATRICES))
    assert found_names == {
        name for name in expected if name.endswith(is_matrix)
        and not (spec.tie_embeddings and name == "lm_head.weight")
    }  # fmt: skip


@pytest.mark.parametrize("num_rows", [1, 7, 64])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_products_are_those_of_the_dequantized_weights(
    kind: str, num_rows: int, tmp_path: Path, held: None
) -> None:
    path = make_gguf(tmp_path / "m", "qwen2", kind)
    _, decoder = load_model(path, "float32", CPU)
    for names, _, held_linear in packed_linears(decoder):
        matrix, bias = held_linear.matrix, held_linear.bias
        x = torch.randn(num_rows, matrix.shape[1], generator=torch.Generator().manual_seed(1))
        product = pack_quantized(matrix, bias, FLOAT32)
        assert isinstance(product, DequantizingLinear) == has_avx2()
        exact = matrix.dequantize().double()
        expected, sizes = x.double() @ exact.T, x.abs().double() @ exact.abs().T
        if bias is not None:
            expected, sizes = expected + bias.double(), sizes + bias.abs().double()
        # Each term is rounded once as a product, once when it is multiplied by the scale, at most
        # once for each input that is added, and once for the bias. Each rounding changes the term
        # by a factor of at most 1 + 2^-24.
        count = matrix.shape[1] + 3
        bound = count * 2.0**-24 / (1 - count * 2.0**-24) * sizes
        assert ((product(x).double() - expected).abs() <= bound).all(), names


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", ["llama3", "qwen2"])
def test_greedy_answers_are_those_of_the_dequantized_file(
    family: str, kind: str, deterministic: bool, tmp_path: Path, kernel: None
) -> None:
    if deterministic and not has_avx2():
        pytest.skip("needs AVX2")
    path = make_gguf(tmp_path / "m", family, kind)
    engines = [engine(path, name, deterministic) for name in ("none", "float")]
    # Both forms have the same weights: layouts differ only if KV must be bitwise identical.
    assert (engines[0].layout != engines[1].layout) == deterministic
    random = torch.Generator().manual_seed(5)
    for _ in range(2):
        prompt = torch.randint(4, VOCAB_SIZE, (30,), generator=random).tolist()
        found, expected = (run_greedy(each, prompt, 24) for each in engines)
        assert found == expected


def engine(path: Path, quantization: str, deterministic: bool) -> Engine:
    options: dict[str, Any] = {"kv_cache_mib": 1, "threads": 1, "dtype": "float32"}
    return Engine(WorkerConfig(
        "test", path, quantization=quantization, deterministic=deterministic, **options
    ))  # fmt: skip


@pytest.mark.skipif(not has_avx2(), reason="needs AVX2")
@pytest.mark.parametrize(("kind", "ratio"), [("Q8_0", 37 / 34), ("Q4_0", 21 / 18)])
def test_packed_weights_take_little_more_than_their_bytes_in_the_file(
    kind: str, ratio: float, tmp_path: Path
) -> None:
    """A block of 34 or 18 bytes is held with a float32 scale and a zero point: 3 more bytes."""
    path = make_gguf(tmp_path / "m", "llama2", kind, intermediate_size=480)
    _, decoder = load_model(path, "float32", CPU)
    entries, num_bytes, stored = loading.find_tensors(path), 0.0, 0
    for names, linear in decoder.linears():
        assert isinstance(linear.packed, DequantizingLinear)
        assert linear.weight.numel() == 0
        fields = linear.packed.codes, linear.packed.scales, linear.packed.zeros
        # Outputs are padded to panels of 48.
        padded = len(linear.packed.bias) / linear.packed.num_outputs
        num_bytes += sum(each.nbytes for each in fields) / padded
        stored += sum(entries[f"{name}.weight"].num_bytes for name in names)
    assert num_bytes == pytest.approx(ratio * stored)


def test_log_says_what_stays_packed_and_both_sizes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kernel: None
) -> None:
    path = make_gguf(tmp_path / "m", "llama2", "Q8_0")
    tensors = open_gguf(path).tensors.values()
    stored = sum(each.num_bytes for each in tensors)
    blocks = sum(each.num_bytes // 34 for each in tensors if each.type.name == "Q8_0")
    embeddings = VOCAB_SIZE * 256
    floats = 4 * (sum(np.prod(each.shape) for each in tensors) - 32 * blocks + embeddings)
    packed = 37 * (blocks - embeddings // 32)
    with caplog.at_level(logging.INFO, loading_log.__name__):
        load_model(path, "float32", CPU)
        load_model(path, "float32", CPU, quantization="float")
    start = f"m.gguf: {stored / 1e6:.1f} MB of weights (Q8_0, F32) are "
    both = caplog.records[0], caplog.records[1]
    assert both[0].message == (
        f"{start}loaded as {(packed + floats) / 1e6:.1f} MB: {packed / 1e6:.1f} MB packed (Q8_0), "
        f"{floats / 1e6:.1f} MB float32"
    )
    assert both[1].message == (
        f"{start}dequantized and loaded as float32: {(128 * blocks + 4 * 5 * 256) / 1e6:.1f} MB"
    )
    assert [each.levelno for each in both] == [logging.INFO, logging.WARNING]


def test_progress_covers_exactly_the_bytes_of_the_file(tmp_path: Path, kernel: None) -> None:
    path = make_gguf(tmp_path / "m", "llama3", "Q4_0")
    calls: list[tuple[int, int]] = []
    load_model(path, "float32", CPU, lambda done, total: calls.append((done, total)))
    expected = sum(
        each.num_bytes
        for name, each in open_gguf(path).tensors.items()
        if not name.startswith("rope_")
    )
    assert calls[-1] == (expected, expected)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 1, 1)])
def test_each_block_is_read_once(
    shape: tuple[int, int, int], tmp_path: Path, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_gguf(tmp_path / "m", "llama2", "Q8_0")
    read: list[tuple[str, int]] = []
    read_rows = GgufEntry.read_rows

    def recorded(entry: GgufEntry, file: Any, device: Any, first: int, count: int) -> Tensor:
        read.extend((entry.own_name, row) for row in range(first, first + count))
        return read_rows(entry, file, device, first, count)

    monkeypatch.setattr(GgufEntry, "read_rows", recorded)
    load_model(path, "float32", CPU, ranks=ranks_of(Mesh(*shape).coord(0)))
    assert any("attn_q" in name for name, _ in read)
    assert len(set(read)) == len(read)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_scale_that_is_not_finite_is_refused(bad: float, tmp_path: Path, kernel: None) -> None:
    path = make_gguf(tmp_path / "m", "llama2", "Q8_0")
    start = open_gguf(path).tensors["blk.1.ffn_up.weight"].start
    with path.open("r+b") as file:
        file.seek(start + 7 * 34)
        file.write(np.float16(bad).tobytes())
    words = r"tensor blk\.1\.ffn_up\.weight has a scale that is not a finite number"
    with pytest.raises(BadCheckpoint, match=words):
        load_model(path, "float32", CPU)


def method_names(decoder: Decoder) -> dict[str, str]:
    return {name: linear.method.name for names, linear in decoder.linears() for name in names}


def test_fused_layer_of_several_types_and_other_types_are_dequantized(
    tmp_path: Path, held: None
) -> None:
    kinds = {"attn_v.weight": "Q4_0", "ffn_down.weight": "Q4_1", "attn_output.weight": "Q5_0"}
    path = make_gguf(
        tmp_path / "m", "llama2",
        lambda name: next((kinds[end] for end in kinds if name.endswith(end)), "Q8_0"),
    )  # fmt: skip
    _, decoder = load_model(path, "float32", CPU)
    packed = {name for name, method in method_names(decoder).items() if method != "float"}
    layers = (f"model.layers.{number}.mlp." for number in range(2))
    assert packed == {
        "lm_head", *(f"{layer}{name}" for layer in layers for name in ("gate_proj", "up_proj"))
    }  # fmt: skip
    expected = weights(path)
    assert all(torch.equal(each, expected[name]) for name, each in matrices(decoder).items())


def test_layers_are_dequantized_if_a_rank_would_hold_a_part_of_a_block(
    tmp_path: Path, held: None
) -> None:
    path = make_gguf(tmp_path / "m", "llama2", "Q8_0", intermediate_size=480)
    spec, expected, mesh = read_spec(path), weights(path), Mesh(tp=4)
    for rank in range(4):
        coord = mesh.coord(rank)
        _, decoder = load_model(path, "float32", CPU, ranks=ranks_of(coord))
        methods = method_names(decoder)
        cut = {name for name, method in methods.items() if method == "float"}
        assert cut == {f"model.layers.{number}.mlp.down_proj" for number in range(2)}
        for names, linear in decoder.linears():
            if names[0] in cut:
                name = f"{names[0]}.weight"
                part = expected[name][region_mask(expected[name], regions(spec, coord)[name])]
                assert torch.equal(linear(torch.eye(120)).T, part.view(256, 120)), name


@pytest.mark.parametrize("change", ["shape", "shrink"])
def test_errors_name_the_entry_of_the_file(
    change: str, tmp_path: Path, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*args: Any) -> dict[str, np.ndarray]:
        found = stored_tensors(*args)
        found["blk.1.ffn_up.weight"] = found["blk.1.ffn_up.weight"][:-1]
        return found

    if change == "shape":
        monkeypatch.setattr("tests.support.gguf_files.stored_tensors", changed)
    path = make_gguf(tmp_path / "m", "llama2", "Q4_0")
    words = r"tensor blk\.1\.ffn_up\.weight has shape \[511, 256\], but .* \[512, 256\]"
    if change == "shrink":
        monkeypatch.setattr(loading, "_stream", shrinking(path, loading._stream))
        words = r"ends inside tensor blk\.1\.ffn_up\.weight"
    with pytest.raises(BadCheckpoint, match=words):
        load_model(path, "float32", CPU)


def shrinking(path: Path, stream: Callable[..., None]) -> Callable[..., None]:
    def shrink(*args: Any) -> None:
        with path.open("r+b") as file:
            file.truncate(open_gguf(path).tensors["blk.1.ffn_up.weight"].start + 4)
        stream(*args)

    return shrink


def test_blocks_stay_packed_only_where_a_kernel_multiplies_them(tmp_path: Path) -> None:
    path, gpu = make_gguf(tmp_path / "m", "llama2", "Q8_0"), torch.device("cuda")
    assert keeps_blocks(path, "none", False, CPU, FLOAT32) == has_avx2()
    assert keeps_blocks(path, "none", True, CPU, FLOAT32) == has_avx2()
    assert keeps_blocks(path, "none", False, gpu, torch.bfloat16)
    assert not keeps_blocks(path, "none", True, gpu, torch.bfloat16)
    assert not keeps_blocks(path, "none", False, CPU, torch.bfloat16)
    assert not keeps_blocks(tmp_path / "m", "none", False, CPU, FLOAT32)
    for name in ("float", "int8", "fp8", "int4"):
        assert not keeps_blocks(path, name, False, CPU, FLOAT32)
    assert has_packable_blocks(path)
    other = write_gguf(
        tmp_path / "m", tmp_path / "k.gguf",
        lambda name: "Q8_0" if name == "token_embd.weight" else "Q4_1",
    )  # fmt: skip
    assert not has_packable_blocks(other)
