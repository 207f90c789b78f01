"""Mesh coordinates: each rank has its own, and together the ranks own each shard exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.parallel.mesh import BadShape, Mesh, MeshCoord, even_partition

MESHES = st.builds(
    lambda expert_tp, ep, pp: Mesh(expert_tp * ep, pp, ep),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 5),
)


def all_coords(mesh: Mesh) -> list[MeshCoord]:
    return [mesh.coord(rank) for rank in range(mesh.num_ranks)]


@given(MESHES)
def test_every_rank_has_a_unique_coordinate(mesh: Mesh) -> None:
    found = {(coord.stage, coord.tp_rank) for coord in all_coords(mesh)}
    assert found == {(stage, column) for stage in range(mesh.pp) for column in range(mesh.tp)}
    experts = {(p.stage, p.ep_rank, p.expert_tp_rank) for p in all_coords(mesh)}
    assert len(experts) == mesh.num_ranks


@given(MESHES)
def test_rank_0_is_in_the_last_stage(mesh: Mesh) -> None:
    first = mesh.coord(0)
    assert first.is_last
    assert first.tp_rank == 0


@given(MESHES)
def test_ranks_of_a_stage_agree_on_its_ranks(mesh: Mesh) -> None:
    for coord in all_coords(mesh):
        for rank in coord.stage_ranks:
            assert mesh.coord(rank).stage_ranks == coord.stage_ranks
        assert coord.rank in coord.stage_ranks
        assert {mesh.coord(rank).stage for rank in coord.stage_ranks} == {coord.stage}


@given(MESHES)
def test_hidden_states_pass_through_every_stage_in_order(mesh: Mesh) -> None:
    for coord in all_coords(mesh):
        if coord.is_first:
            path = [coord]
            while (after := path[-1].next_stage) is not None:
                assert mesh.coord(after).prev_stage == path[-1].rank
                path.append(mesh.coord(after))
            assert [each.stage for each in path] == list(range(mesh.pp))
            assert {each.tp_rank for each in path} == {coord.tp_rank}


@given(MESHES, st.integers(1, 40))
def test_tokens_are_divided_in_a_stage_and_layers_among_stages(mesh: Mesh, count: int) -> None:
    stage = [mesh.coord(rank) for rank in mesh.coord(0).stage_ranks]
    assert [t for coord in stage for t in coord.tokens(count)] == list(range(count))
    assert len({len(coord.tokens(count)) for coord in stage if coord.tokens(count)}) <= 2
    layers = sorted(layer for coord in all_coords(mesh) if coord.tp_rank == 0
                    for layer in coord.layers(count))  # fmt: skip
    assert layers == list(range(count))


@given(st.integers(0, 50), st.integers(1, 9))
def test_even_partition_assigns_each_item_once_and_evenly(num_items: int, num_owners: int) -> None:
    parts = [even_partition(num_items, num_owners, owner) for owner in range(num_owners)]
    assert [item for part in parts for item in part] == list(range(num_items))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 4), "ep 4 does not divide tp 2"),
        ((1, 1, 2), "ep 2 does not divide tp 1"),
        ((0, 1, 1), "must be 1 or more"),
    ],
)
def test_invalid_mesh_is_refused(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(BadShape, match=message):
        Mesh(*shape)
