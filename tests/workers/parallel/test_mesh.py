"""Places in a mesh: every rank has one, and together they have everything once."""

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


def places(mesh: Mesh) -> list[MeshCoord]:
    return [mesh.coord(rank) for rank in range(mesh.num_ranks)]


@given(MESHES)
def test_every_rank_has_a_place_of_its_own(mesh: Mesh) -> None:
    found = {(place.stage, place.tp_rank) for place in places(mesh)}
    assert found == {(stage, column) for stage in range(mesh.pp) for column in range(mesh.tp)}
    experts = {(p.stage, p.ep_rank, p.expert_tp_rank) for p in places(mesh)}
    assert len(experts) == mesh.num_ranks


@given(MESHES)
def test_the_rank_that_leads_has_the_logits(mesh: Mesh) -> None:
    first = mesh.coord(0)
    assert first.is_last
    assert first.tp_rank == 0


@given(MESHES)
def test_peers_agree_on_who_they_are(mesh: Mesh) -> None:
    for place in places(mesh):
        for group in ("stage_ranks", "expert_ranks"):
            for rank in getattr(place, group):
                assert getattr(mesh.coord(rank), group) == getattr(place, group)
            assert place.rank in getattr(place, group)
        assert {mesh.coord(rank).stage for rank in place.stage_ranks} == {place.stage}
        assert {mesh.coord(r).expert_tp_rank for r in place.expert_ranks} == {place.expert_tp_rank}
        assert [mesh.coord(r).ep_rank for r in place.expert_ranks] == list(range(mesh.ep))


@given(MESHES)
def test_hidden_states_pass_every_stage(mesh: Mesh) -> None:
    for place in places(mesh):
        if place.is_first:
            seen = [place]
            while (after := seen[-1].next_stage) is not None:
                assert mesh.coord(after).prev_stage == seen[-1].rank
                seen.append(mesh.coord(after))
            assert [each.stage for each in seen] == list(range(mesh.pp))
            assert {each.tp_rank for each in seen} == {place.tp_rank}


@given(MESHES, st.integers(1, 40))
def test_a_stage_has_every_token_and_the_stages_every_layer_once(mesh: Mesh, count: int) -> None:
    stage = [mesh.coord(rank) for rank in mesh.coord(0).stage_ranks]
    assert [t for place in stage for t in place.tokens(count)] == list(range(count))
    assert len({len(place.tokens(count)) for place in stage if place.tokens(count)}) <= 2
    layers = sorted(layer for place in places(mesh) if place.tp_rank == 0
                    for layer in place.layers(count))  # fmt: skip
    assert layers == list(range(count))


@given(st.integers(0, 50), st.integers(1, 9))
def test_what_is_owned_is_owned_once_and_evenly(num_items: int, num_owners: int) -> None:
    parts = [even_partition(num_items, num_owners, owner) for owner in range(num_owners)]
    assert [item for part in parts for item in part] == list(range(num_items))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((2, 1, 4), "ep 4 does not divide tp 2"),
        ((1, 1, 2), "ep 2 does not divide tp 1"),
        ((0, 1, 1), "must be 1 or more"),
    ],
)
def test_no_mesh(shape: tuple[int, int, int], said: str) -> None:
    with pytest.raises(BadShape, match=said):
        Mesh(*shape)
