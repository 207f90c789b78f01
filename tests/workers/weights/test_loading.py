"""Loading of checkpoint folders with one file or several files, complete or incomplete."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.workers.models.config import BadCheckpoint, UnsupportedModel
from penstock.workers.parallel.collectives import ProcessGroup
from penstock.workers.parallel.mesh import Mesh
from penstock.workers.parallel.parallel_groups import ParallelGroups
from penstock.workers.weights.loading import INDEX, SINGLE, choose_dtype, find_tensors, load_model
from penstock.workers.weights.safetensors import CHUNK_BYTES
from tests.support.checkpoints import make_checkpoint
from tests.support.planner import generate

CPU = torch.device("cpu")

Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama32")
    return tmp_path


def edit(folder: Path, change: Edit) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_sharded_checkpoint_equals_a_single_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", "qwen3")
    make_checkpoint(tmp_path / "many", "qwen3", max_shard_size="40KB")
    assert not (tmp_path / "many" / SINGLE).exists()
    one, many = (load_model(tmp_path / name, "auto", CPU)[1] for name in ("one", "many"))
    for name, expected in one.tensors().items():
        assert torch.equal(many.tensors()[name], expected)


def test_index_next_to_a_single_file_is_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "old", "qwen3", max_shard_size="40KB")
    make_checkpoint(tmp_path / "new", "qwen3")
    (tmp_path / "new" / SINGLE).rename(tmp_path / "old" / SINGLE)
    assert {entry.path.name for entry in find_tensors(tmp_path / "old").values()} == {SINGLE}
    # When transformers saves a model again, it deletes the old shards, but not their index.
    for shard in (tmp_path / "old").glob("model-*.safetensors"):
        shard.unlink()
    load_model(tmp_path / "old", "auto", CPU)


def test_progress_counts_bytes_up_to_the_total(folder: Path) -> None:
    progress: list[tuple[int, int]] = []
    _, decoder = load_model(folder, "auto", CPU, lambda done, total: progress.append((done, total)))
    total = sum(tensor.nbytes for tensor in decoder.tensors().values())
    assert progress[0] == (0, total)
    assert progress[-1] == (total, total)
    assert progress == sorted(progress)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_16_bit_checkpoint_is_loaded_as_float32_on_a_cpu(folder: Path, kind: torch.dtype) -> None:
    narrow = {name: value.to(kind) for name, value in load_file(folder / SINGLE).items()}
    save_file(narrow, folder / SINGLE)
    configure(folder, dtype=str(kind).removeprefix("torch."))
    spec, decoder = load_model(folder, "auto", CPU)
    assert decoder.dtype == torch.float32
    assert decoder.norm is not None
    assert torch.equal(decoder.norm.weight, narrow["model.norm.weight"].float())
    assert choose_dtype("auto", spec.dtype, torch.device("cuda")) == kind
    _, kept = load_model(folder, "bfloat16", CPU)
    assert kept.dtype == torch.bfloat16


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'int3': expected auto"):
        load_model(folder, "int3", CPU)


def test_redundant_tensors_of_older_tools_are_ignored(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        # This tensor is redundant, because the head is tied to the embedding.
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)

    edit(folder, add)
    spec, _ = load_model(folder, "auto", CPU)
    assert spec.tie_embeddings


def untie(tensors: dict[str, torch.Tensor]) -> None:
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    tensors["lm_head.weight"] = head


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 1000])
def test_head_that_differs_from_the_embeddings_is_not_tied(
    folder: Path,
    chunk_bytes: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.workers.weights.tied_embeddings.CHUNK_BYTES", chunk_bytes)
    prompt = [5, 6, 7]
    tied, _ = load_model(folder, "auto", CPU)
    edit(folder, untie)
    expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([prompt])).logits[0, -1]
    spec, decoder = load_model(folder, "auto", CPU)
    assert (tied.tie_embeddings, spec.tie_embeddings) == (True, False)
    assert "different lm_head.weight" in caplog.text
    [[logits]] = generate(decoder, [prompt], 1)[1]
    torch.testing.assert_close(logits, expected)


def test_all_ranks_use_a_head_that_differs_from_the_embeddings(folder: Path) -> None:
    edit(folder, untie)
    stored = load_file(folder / SINGLE)["lm_head.weight"]
    for mesh in (Mesh(2), Mesh(1, 2)):
        shards = []
        for rank in range(mesh.num_ranks):
            ranks = ParallelGroups(mesh.coord(rank), cast(ProcessGroup, object()))
            spec, decoder = load_model(folder, "auto", CPU, ranks=ranks)
            assert not spec.tie_embeddings
            shards += [decoder.head.weight] if decoder.head is not None else []
        assert torch.equal(torch.cat(shards), stored)


def test_head_of_another_shape_than_the_embeddings_is_refused(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(7, 48)}))
    with pytest.raises(BadCheckpoint, match=r"lm_head.weight has shape \[7, 48\]"):
        load_model(folder, "auto", CPU)


def test_multi_token_prediction_layers_are_not_loaded(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v3")
    further = "model.layers.3.eh_proj.weight"
    edit(tmp_path, lambda tensors: tensors.update({further: torch.zeros(48, 96)}))
    configure(tmp_path, num_nextn_predict_layers=1)
    load_model(tmp_path, "auto", CPU)
    configure(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(BadCheckpoint, match=f"unexpected tensor {further}"):
        load_model(tmp_path, "auto", CPU)


def test_moe_gates_stay_in_float32(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v3")
    tensors = load_model(tmp_path, "bfloat16", CPU)[1].tensors()
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    gates = {f"model.layers.{n}.mlp.gate" for n in (1, 2)}
    assert wide == {f"{g}.{name}" for g in gates for name in ("weight", "e_score_correction_bias")}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"lacks tensor {NORM} .*llama, 2 layers"),
        (lambda t: [t.pop(name) for name in list(t)[:4]], "lacks tensor .* and 3 more"),
        (lambda t: t.update(odd=torch.zeros(1)), "unexpected tensor odd"),
        (lambda t: t.update({NORM: torch.zeros(7)}), rf"{NORM} has shape \[7\].*requires \[48\]"),
        (lambda t: t.update({NORM: torch.zeros(48, dtype=torch.int8)}), f"{NORM} has dtype I8"),
    ],
)
def test_missing_or_mismatched_tensors_are_refused(
    folder: Path, change: Edit, message: str
) -> None:
    edit(folder, change)
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=message):
        load_model(folder, "auto", CPU)


def test_config_of_another_model_is_refused(folder: Path) -> None:
    configure(folder, num_hidden_layers=3)
    with pytest.raises(BadCheckpoint, match=r"lacks tensor model\.layers\.2\..* and \d+ more"):
        load_model(folder, "auto", CPU)
    configure(folder, num_hidden_layers=2, intermediate_size=1 << 24)
    # The shape is checked first: allocating memory for it would fail.
    with pytest.raises(BadCheckpoint, match=r"has shape .*16777216"):
        load_model(folder, "auto", CPU)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "consolidated.00.pth", "sq-w4-s0.pt"])
def test_folder_without_weights_is_refused(folder: Path, pickle: str) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(BadCheckpoint, match=r"neither model\.safetensors nor"):
        load_model(folder, "auto", CPU)
    (folder / pickle).write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="pickled weights only"):
        load_model(folder, "auto", CPU)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama32", max_shard_size="40KB")
    return tmp_path


def test_missing_shard_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BadCheckpoint, match=f"{shard.name} is missing"):
        load_model(sharded, "auto", CPU)


def test_half_copied_shard_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match=f"{shard.name} is corrupt or incomplete"):
        load_model(sharded, "auto", CPU)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "no valid weight_map"),
        ({NORM: 3}, "no valid weight_map"),
        ({NORM: "../secret.safetensors"}, "no valid weight_map"),
        ({NORM: "/etc/passwd"}, "no valid weight_map"),
        ({NORM: ".."}, "no valid weight_map"),
    ],
)
def test_index_with_invalid_file_names_is_refused(
    sharded: Path, weight_map: object, message: str
) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BadCheckpoint, match=message):
        load_model(sharded, "auto", CPU)


def test_index_that_names_the_wrong_shard_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][NORM] = next(f for f in files if f != index["weight_map"][NORM])
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match=f"lacks tensor {NORM}"):
        load_model(sharded, "auto", CPU)


def test_bloom_tensor_names_may_lack_the_transformer_prefix(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "bloom")
    expected = load_model(tmp_path, "auto", CPU)[1]

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    edit(tmp_path, strip)
    found = load_model(tmp_path, "auto", CPU)[1]
    assert found.embeddings is not None
    assert expected.embeddings is not None
    assert torch.equal(found.embeddings, expected.embeddings)
