"""Sharding: each rank holds only its shard, and together the ranks hold the whole model."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from penstock.workers.layers.mla import LatentAttention
from penstock.workers.models.decoder import Decoder, empty_decoder
from penstock.workers.models.spec import ModelSpec, read_spec
from penstock.workers.parallel.collectives import ProcessGroup
from penstock.workers.parallel.mesh import BadShape, Mesh, MeshCoord
from penstock.workers.parallel.parallel_groups import SINGLE_RANK, ParallelGroups
from penstock.workers.weights.loading import load_model
from penstock.workers.weights.sharding import check_shape, kv_heads, region_shape, regions
from tests.support.ranks import MODELS, make_model

CPU, META = torch.device("cpu"), torch.device("meta")
DENSE = [(2, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1)]
SPARSE = [*DENSE, (2, 1, 2), (4, 1, 2), (4, 1, 4), (4, 2, 2)]
CASES = [(name, mesh) for name in MODELS for mesh in
         (SPARSE if {"moe", "oss", "deepseek"} & {*name.split("-")} else DENSE)]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, name) for name in MODELS}


def ranks_of(coord: MeshCoord) -> ParallelGroups:
    """Return a rank's groups. Loading does not use the process group, so it is a placeholder."""
    placeholder = cast(ProcessGroup, object())
    return ParallelGroups(coord, placeholder if coord.mesh.tp > 1 else None)


def region_mask(tensor: torch.Tensor, region: tuple[object, ...]) -> torch.Tensor:
    """Return a mask of `tensor` that is True inside `region`."""
    mask = torch.ones(tensor.shape, dtype=torch.bool)
    for at, ranges in enumerate(region):
        if ranges is not None:
            inside = torch.zeros(tensor.shape[at], dtype=torch.bool)
            for first, last in cast(tuple[tuple[int, int], ...], ranges):
                inside[first:last] = True
            shape = [1] * tensor.dim()
            shape[at] = -1
            mask &= inside.view(shape)
    return mask


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_ranks_together_hold_every_weight(
    models: dict[str, Path], name: str, shape: tuple[int, int, int]
) -> None:
    spec, mesh = read_spec(models[name]), Mesh(*shape)
    whole = empty_decoder(spec, torch.float32, META).tensors()
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}
    for rank in range(mesh.num_ranks):
        coord = mesh.coord(rank)
        own_regions = regions(spec, coord)
        held = empty_decoder(spec, torch.float32, META, ranks=ranks_of(coord)).tensors()
        for tensor, shard in held.items():
            region = own_regions.get(tensor, ())
            assert tuple(shard.shape) == region_shape(tuple(whole[tensor].shape), region), tensor
            counts[tensor] += region_mask(whole[tensor], region)
    for tensor, count in counts.items():
        assert count.min() >= 1, tensor


@pytest.mark.parametrize("name", ["llama", "phi3", "falcon", "mpt", "gpt-oss", "deepseek"])
def test_rank_reads_and_holds_exactly_its_regions(models: dict[str, Path], name: str) -> None:
    spec, whole = load_model(models[name], "auto", CPU)
    # `load_model` has reordered the fused rows of q, k and v; `load_into` does not.
    if spec.qkv_grouped:
        whole = empty_decoder(spec, torch.float32, CPU)
        load_into(models[name], whole)
    for rank in range(4):
        coord = Mesh(2, 2).coord(rank)
        progress: list[tuple[int, int]] = []
        part = load_part(models[name], coord, progress)
        expected = whole.tensors()
        read = 0
        for tensor, values in part.tensors().items():
            region = regions(spec, coord).get(tensor, ())
            if not (spec.qkv_grouped and "query_key_value" in tensor):
                shard = expected[tensor][region_mask(expected[tensor], region)].view(values.shape)
                assert torch.equal(values, shard), tensor
            read += values.nbytes
        assert progress[-1] == (read, read), "a rank must read only its own bytes"
        assert read < 0.6 * sum(tensor.nbytes for tensor in expected.values())


def load_into(folder: Path, decoder: Decoder) -> None:
    from safetensors.torch import load_file

    values = load_file(folder / "model.safetensors")
    for name, target in decoder.tensors().items():
        target.copy_(values[name])


def load_part(folder: Path, coord: MeshCoord, progress: list[tuple[int, int]]) -> Decoder:
    ranks = ranks_of(coord)
    return load_model(
        folder, "auto", CPU, lambda done, total: progress.append((done, total)), ranks=ranks
    )[1]


def test_kv_heads_are_divided_or_replicated(models: dict[str, Path]) -> None:
    spec = read_spec(models["llama"])
    for tp, expected in ((1, [(0, 2)]), (2, [(0, 1), (1, 2)]), (4, [(0, 1)] * 2 + [(1, 2)] * 2)):
        found = [kv_heads(spec, Mesh(tp).coord(rank)) for rank in range(tp)]
        assert [(heads.start, heads.stop) for heads in found] == expected


def test_mla_cache_rows_are_on_every_rank(models: dict[str, Path]) -> None:
    spec = read_spec(models["deepseek"])
    part = empty_decoder(spec, torch.float32, META, ranks=ranks_of(Mesh(4).coord(3)))
    assert part.spec.kv_shape == spec.kv_shape
    attention = part.layers[0].attention
    assert isinstance(attention, LatentAttention)
    assert len(attention.up_heads) == 1
    assert kv_heads(spec, Mesh(4).coord(3)) == range(1)


@pytest.mark.parametrize(
    ("name", "shape", "changes", "message"),
    [
        ("llama", (3, 1, 1), {}, "tp 3 is neither a divisor nor a multiple of 2"),
        ("llama", (8, 1, 1), {}, "tp 8 does not divide the model's 4 attention heads"),
        ("llama", (1, 6, 1), {}, "pp 6 is more than the model's 5 layers"),
        ("llama", (2, 1, 2), {}, "ep 2 cannot be used with a model without experts"),
        ("llama", (4, 1, 1), {"intermediate_size": 50}, "tp 4 does not divide the model's 50 feed"),
        ("llama", (2, 1, 1), {"qk_norm": "whole"}, "normalises all heads together"),
        (
            "qwen2-moe",
            (16, 1, 8),
            {"num_heads": 16, "num_kv_heads": 16},
            "more than the model.s 7 experts",
        ),
        ("deepseek", (8, 1, 1), {}, "tp 8 does not divide the model's 4 attention heads"),
    ],
)
def test_mesh_that_does_not_fit_the_model_is_refused(
    models: dict[str, Path],
    name: str,
    shape: tuple[int, int, int],
    changes: dict[str, object],
    message: str,
) -> None:
    spec: ModelSpec = replace(read_spec(models[name]), **changes)  # type: ignore[arg-type]
    with pytest.raises(BadShape, match=message):
        check_shape(spec, Mesh(*shape))


def test_experts_that_cannot_be_divided_are_refused(models: dict[str, Path]) -> None:
    spec = read_spec(models["gpt-oss"])
    assert spec.experts is not None
    odd = replace(spec, experts=replace(spec.experts, inner_size=22))
    with pytest.raises(BadShape, match=r"22 features of an expert into 4 parts|does not divide"):
        check_shape(odd, Mesh(4))
    check_shape(odd, Mesh(4, ep=2))
    with pytest.raises(BadShape, match=r"tp / ep = 4 / 2 = 2 does not divide the model's 21 "):
        check_shape(replace(spec, experts=replace(spec.experts, inner_size=21)), Mesh(4, ep=2))


def test_single_rank_has_no_partial_regions(models: dict[str, Path]) -> None:
    spec = read_spec(models["llama"])
    assert regions(spec, SINGLE_RANK.coord) == {}
