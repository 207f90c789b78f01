"""Weights of GGUF files in a model equal those of the checkpoint that a file was made from."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

from penstock.common.gguf.checkpoint import open_gguf
from penstock.common.gguf.tensor_types import BY_NAME
from penstock.workers.models.config import BadCheckpoint
from penstock.workers.models.spec import read_spec
from penstock.workers.parallel.mesh import Mesh
from penstock.workers.rank.fingerprint import model_fingerprint
from penstock.workers.weights import loading
from penstock.workers.weights.gguf import loading_log
from penstock.workers.weights.gguf import tensors as gguf_tensors
from penstock.workers.weights.gguf.dequantize import DEQUANTIZE
from penstock.workers.weights.gguf.tensors import find_gguf_tensors
from penstock.workers.weights.loading import load_model
from penstock.workers.weights.sharding import region_shape, regions
from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.support.gguf_files import interleaved, stored_tensors, write_gguf

CPU = torch.device("cpu")
SERVED = (
    *("llama2", "llama3", "llama32", "qwen2", "qwen3", "gemma2", "gemma3"),
    *("phi3", "phi3-short"),
)


def weights(model: Path) -> dict[str, Tensor]:
    """Return all weights as float32, as a rank that has the whole model loads them."""
    found = {}
    for name, entry in loading.find_tensors(model).items():
        found[name] = torch.empty(entry.shape)
        with entry.path.open("rb") as file:
            entry.load(found[name], file, lambda num_bytes: None)
    return found


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_float_file_loads_the_weights_of_its_checkpoint(
    family: str, kind: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "m", family)
    _round_matrices(tmp_path / "m", kind)
    expected = weights(tmp_path / "m")
    path = write_gguf(tmp_path / "m", tmp_path / "m.gguf", kind)
    found = weights(path)
    load_model(path, "float32", CPU)  # raises an error for a missing or an additional tensor
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # A GGUF file stores Gemma's norm weights plus 1, rounded to a multiple of 2^-23.
        bound = 2.0**-23 if family.startswith("gemma") and "norm" in name else 0.0
        assert (found[name] - tensor).abs().max() <= bound, name


def _round_matrices(folder: Path, kind: str) -> None:
    """Round the matrices of a checkpoint to a 16-bit type; they are still stored as float32."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    found = load_file(folder / "model.safetensors")
    rounded = {
        name: each.to(dtype).float() if each.dim() > 1 else each for name, each in found.items()
    }
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})


def test_transformers_reads_the_weights_that_these_tests_write() -> None:
    items = np.arange(48 * 5, dtype=np.float32).reshape(48, 5)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    llama, gemma = TENSOR_PROCESSORS["llama"](heads), TENSOR_PROCESSORS["gemma2"]({})
    for name, num_heads in (("attn_q", 4), ("attn_k", 2)):
        found = llama.process(interleaved(items, num_heads), f"blk.0.{name}.weight").weights
        assert np.array_equal(found, items)
    assert np.array_equal(gemma.process(items + 1, "blk.0.attn_norm.weight").weights, items)


def wide_checkpoint(folder: Path, family: str = "llama2") -> Path:
    """Write a checkpoint whose rows are multiples of 256 items, as K-quants require."""
    config = FAMILIES[family]()
    config.update({"hidden_size": 256, "intermediate_size": 512, "head_dim": 64})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.checkpoints import make_tokenizer

    folder = wide_checkpoint(tmp_path_factory.mktemp("wide") / "m")
    make_tokenizer(folder)
    return folder


def oracle(folder: Path, path: Path) -> dict[str, np.ndarray]:
    """Return the items of a file by name, dequantized by the `gguf` package."""
    reader = gguf.GGUFReader(path)
    return {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type).reshape(
            [int(size) for size in each.shape[::-1]]
        )
        for each in reader.tensors
    }


MIXED = {
    "attn_v.weight": "Q6_K",
    "ffn_down.weight": "Q5_K",
    "token_embd.weight": "Q8_0",
    "attn_output.weight": "Q4_0",
    "output.weight": "Q6_K",
}


def kind_function(kind: str) -> Callable[[str], str]:
    if kind != "mixed":
        return lambda name: kind
    return lambda name: next((MIXED[end] for end in MIXED if name.endswith(end)), "Q4_K")


@pytest.mark.parametrize("kind", [*BY_NAME, "mixed"])
def test_quantized_file_loads_what_the_gguf_package_dequantizes(
    kind: str, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(wide, tmp_path / "m.gguf", kind_function(kind))
    # Tensors are loaded in several chunks, of which the last one is smaller.
    monkeypatch.setattr(gguf_tensors, "CHUNK_ITEMS", 100 * 256)
    found = weights(path)
    # `stored_tensors` gives the loaded weights the names and the row order of a GGUF file.
    config = json.loads((wide / "config.json").read_text())
    renamed = stored_tensors("llama", config, found)
    expected = oracle(wide, path)
    assert renamed.keys() == expected.keys()
    for name, items in expected.items():
        assert np.array_equal(renamed[name], items), name


@pytest.mark.parametrize("kind", ["Q4_K", "mixed"])
def test_rank_loads_its_part_of_every_tensor(kind: str, wide: Path, tmp_path: Path) -> None:
    path = write_gguf(wide, tmp_path / "m.gguf", kind_function(kind))
    whole, spec = weights(path), read_spec(path)
    entries = find_gguf_tensors(path)
    for rank in range(2):
        parts = regions(spec, Mesh(tp=2).coord(rank))
        for name, entry in entries.items():
            region = parts.get(name, ())
            target = torch.empty(region_shape(entry.shape, region))
            counts: list[int] = []
            with path.open("rb") as file:
                entry.load(target, file, counts.append, region)
            expected = whole[name]
            for axis, ranges in enumerate(region):
                if ranges is not None:
                    rows = [torch.arange(first, last) for first, last in ranges]
                    expected = expected.index_select(axis, torch.cat(rows))
            assert torch.equal(target, expected), name
            assert sum(counts) == entry.bytes_of(target.numel())


def test_no_more_than_a_chunk_is_dequantized_at_once(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(wide, tmp_path / "m.gguf", kind_function("Q4_K"))
    sizes = []

    def dequantize(blocks: Tensor, dtype: str) -> Tensor:
        sizes.append(len(blocks) * BY_NAME[dtype].block_items)
        return DEQUANTIZE[dtype](blocks)

    monkeypatch.setattr(gguf_tensors, "dequantize", dequantize)
    # 64 rows, as many as one attention head has.
    monkeypatch.setattr(gguf_tensors, "CHUNK_ITEMS", 64 * 256)
    weights(path)
    assert max(sizes) == 64 * 256


def test_progress_covers_exactly_the_bytes_of_the_file(wide: Path, tmp_path: Path) -> None:
    path = write_gguf(wide, tmp_path / "m.gguf", kind_function("mixed"))
    calls: list[tuple[int, int]] = []
    load_model(path, "float32", CPU, lambda done, total: calls.append((done, total)))
    num_bytes = sum(each.num_bytes for each in open_gguf(path).tensors.values())
    assert calls[0] == (0, num_bytes)
    assert calls[-1] == (num_bytes, num_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_missing_head_is_tied_to_the_embeddings(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", "llama32")
    path = write_gguf(tmp_path / "m", tmp_path / "m.gguf")
    assert "output.weight" not in open_gguf(path).tensors
    assert read_spec(path).tie_embeddings


def test_log_says_in_one_line_what_is_dequantized(
    wide: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(wide, tmp_path / "m.gguf", kind_function("Q4_K"))
    tensors = open_gguf(path).tensors.values()
    num_items = sum(np.prod(each.shape) for each in tensors)
    stored = sum(each.num_bytes for each in tensors)
    with caplog.at_level(logging.INFO, loading_log.__name__):
        load_model(path, "float32", CPU, quantization="int8")
    assert [record.message for record in caplog.records] == [
        f"m.gguf: {stored / 1e6:.1f} MB of weights (Q4_K, F32) are dequantized and loaded as "
        f"float32: {num_items * 4 / 1e6:.1f} MB, before quantization to int8"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_split_file_loads_the_same_weights(wide: Path, tmp_path: Path) -> None:
    expected = weights(write_gguf(wide, tmp_path / "whole.gguf", "Q8_0"))
    write_gguf(wide, tmp_path / "m.gguf", "Q8_0", split_max_tensors=8)
    found = weights(tmp_path / "m-00001-of-00003.gguf")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_fingerprint_covers_metadata_weights_and_all_parts(wide: Path, tmp_path: Path) -> None:
    def fingerprint(kind: str, add: Callable[[gguf.GGUFWriter], None]) -> str:
        return model_fingerprint(write_gguf(wide, tmp_path / "m.gguf", kind, extra=add))

    found = [
        fingerprint("Q8_0", lambda writer: None),
        fingerprint("Q4_0", lambda writer: None),
        fingerprint("Q8_0", lambda writer: writer.add_rope_scaling_factor(2.0)),
    ]
    assert fingerprint("Q8_0", lambda writer: None) == found[0]
    assert len(set(found)) == 3
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[-1] ^= 1
    (tmp_path / "m.gguf").write_bytes(data)
    assert model_fingerprint(tmp_path / "m.gguf") not in found
    write_gguf(wide, tmp_path / "s.gguf", "Q8_0", split_max_tensors=8)
    last = tmp_path / "s-00003-of-00003.gguf"
    before = model_fingerprint(tmp_path / "s-00001-of-00003.gguf")
    last.write_bytes(last.read_bytes()[:-1] + b"\x7f")
    assert model_fingerprint(tmp_path / "s-00001-of-00003.gguf") != before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("drop", r"lacks tensor blk\.1\.ffn_up\.weight \(the metadata says llama, 2 layers\)"),
        ("add", r"has the unexpected tensor blk\.7\.ffn_up\.weight"),
        ("vector", r"ffn_up\.weight has type Q8_0 and shape \[256\]: expected a matrix"),
        ("shape", r"tensor blk\.1\.ffn_up\.weight has shape \[511, 256\], but .* \[512, 256\]"),
    ],
)
def test_tensors_that_do_not_fit_the_metadata_are_refused(
    change: str, words: str, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*args: object) -> dict[str, np.ndarray]:
        found = stored_tensors(*args)  # type: ignore[arg-type]
        items = found.pop("blk.1.ffn_up.weight")
        if change == "add":
            found["blk.7.ffn_up.weight"] = found["blk.1.ffn_up.weight"] = items
        if change == "shape":
            found["blk.1.ffn_up.weight"] = items[:-1]
        return found

    def add(writer: gguf.GGUFWriter) -> None:
        if change == "vector":
            kind = gguf.GGMLQuantizationType.Q8_0
            row = gguf.quants.quantize(np.ones(256, dtype=np.float32), kind)
            writer.add_tensor("blk.1.ffn_up.weight", row, raw_dtype=kind)

    monkeypatch.setattr("tests.support.gguf_files.stored_tensors", changed)
    path = write_gguf(wide, tmp_path / "m.gguf", extra=add)
    with pytest.raises(BadCheckpoint, match=words) as raised:
        load_model(path, "float32", CPU)
    assert "\n" not in str(raised.value)


def test_file_that_shrinks_while_it_is_loaded_is_refused(wide: Path, tmp_path: Path) -> None:
    path = write_gguf(wide, tmp_path / "m.gguf")
    entry = find_gguf_tensors(path)["model.norm.weight"]
    with path.open("r+b") as file:
        file.truncate(entry.start + 4)
    with (
        path.open("rb") as file,
        pytest.raises(BadCheckpoint, match=r"ends inside tensor output_norm\.weight"),
    ):
        entry.load(torch.empty(entry.shape), file, lambda num_bytes: None)
