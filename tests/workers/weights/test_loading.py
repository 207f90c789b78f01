"""Whole folders: single and sharded, complete and not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.workers.models.config import BadCheckpoint, UnsupportedModel
from penstock.workers.weights.loading import INDEX, SINGLE, choose_dtype, load_model
from tests.support.checkpoints import make_checkpoint

CPU = torch.device("cpu")

Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama32")
    return tmp_path


def edit(folder: Path, change: Edit) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", "qwen3")
    make_checkpoint(tmp_path / "many", "qwen3", max_shard_size="40KB")
    assert not (tmp_path / "many" / SINGLE).exists()
    one, many = (load_model(tmp_path / name, "auto", CPU)[1] for name in ("one", "many"))
    for name, expected in one.tensors().items():
        assert torch.equal(many.tensors()[name], expected)


def test_progress_counts_bytes_to_the_end(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    _, decoder = load_model(folder, "auto", CPU, lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in decoder.tensors().values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_narrow_checkpoints_are_widened_on_a_cpu(folder: Path, kind: torch.dtype) -> None:
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
    with pytest.raises(ValueError, match="'int3' is not one of auto"):
        load_model(folder, "int3", CPU)


def test_what_older_tools_leave_in_is_ignored(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # tied
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)

    edit(folder, add)
    load_model(folder, "auto", CPU)


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v3")
    further = "model.layers.3.eh_proj.weight"
    edit(tmp_path, lambda tensors: tensors.update({further: torch.zeros(48, 96)}))
    configure(tmp_path, num_nextn_predict_layers=1)
    load_model(tmp_path, "auto", CPU)
    configure(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(BadCheckpoint, match=f"unexpected tensor {further}"):
        load_model(tmp_path, "auto", CPU)


def test_routing_stays_wide(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v3")
    tensors = load_model(tmp_path, "bfloat16", CPU)[1].tensors()
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    gates = {f"model.layers.{n}.mlp.gate" for n in (1, 2)}
    assert wide == {f"{g}.{name}" for g in gates for name in ("weight", "e_score_correction_bias")}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), f"lacks tensor {NORM} .*llama, 2 layers"),
        (lambda t: [t.pop(name) for name in list(t)[:4]], "lacks tensor .* and 3 more"),
        (lambda t: t.update(odd=torch.zeros(1)), "unexpected tensor odd"),
        (lambda t: t.update({NORM: torch.zeros(7)}), rf"{NORM} has shape \[7\].*makes it \[48\]"),
        (lambda t: t.update({NORM: torch.zeros(48, dtype=torch.int8)}), f"{NORM} is I8"),
    ],
)
def test_tensors_that_do_not_fit(folder: Path, change: Edit, words: str) -> None:
    edit(folder, change)
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=words):
        load_model(folder, "auto", CPU)


def test_a_config_of_another_model(folder: Path) -> None:
    configure(folder, num_hidden_layers=3)
    with pytest.raises(BadCheckpoint, match=r"lacks tensor model\.layers\.2\..* and \d+ more"):
        load_model(folder, "auto", CPU)
    configure(folder, num_hidden_layers=2, intermediate_size=1 << 24)
    with pytest.raises(BadCheckpoint, match=r"has shape .*16777216"):  # and no memory was taken
        load_model(folder, "auto", CPU)


def test_no_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(BadCheckpoint, match=r"neither model\.safetensors nor"):
        load_model(folder, "auto", CPU)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="pickled weights only"):
        load_model(folder, "auto", CPU)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama32", max_shard_size="40KB")
    return tmp_path


def test_a_missing_shard(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(BadCheckpoint, match=f"{victim.name} is missing"):
        load_model(sharded, "auto", CPU)


def test_a_half_copied_shard(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match=f"{victim.name} is corrupt or half-copied"):
        load_model(sharded, "auto", CPU)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (None, "no sound weight_map"),
        ({NORM: 3}, "no sound weight_map"),
        ({NORM: "../secret.safetensors"}, "no sound weight_map"),
        ({NORM: "/etc/passwd"}, "no sound weight_map"),
        ({NORM: ".."}, "no sound weight_map"),
    ],
)
def test_an_index_that_points_elsewhere(sharded: Path, places: object, words: str) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(BadCheckpoint, match=words):
        load_model(sharded, "auto", CPU)


def test_an_index_that_is_wrong_about_a_file(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][NORM] = next(f for f in files if f != index["weight_map"][NORM])
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match=f"lacks tensor {NORM}"):
        load_model(sharded, "auto", CPU)


def test_names_may_lack_what_bloom_has_before_all_of_them(tmp_path: Path) -> None:
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
