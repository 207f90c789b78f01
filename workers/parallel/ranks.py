"""What a rank shares with the other ranks of its worker."""

from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from penstock.workers.parallel.group import Group, Links, make_group, make_links
from penstock.workers.parallel.mesh import FIRST, Place


@dataclass(frozen=True, slots=True)
class Ranks:
    """Its place among them, and what they do together; alone: nothing."""

    place: Place = FIRST
    stage: Group | None = None  # the ranks of its stage, if it is not the only one
    experts: Group | None = None  # those of them that have other experts, if there are any
    links: Links | None = None  # to other stages, if there are any


ALONE = Ranks()


def join(place: Place, store: Store, device: torch.device, host: str, seconds: float) -> Ranks:
    """Meet the others; `RankLost` if they do not come.

    seconds: the longest that an operation with the others may take, from then on.
    """
    mesh = place.mesh
    stage = experts = links = None
    if mesh.tp > 1:
        stage = make_group(store, place.peers, place.rank, device, host, seconds)
    if mesh.ep == mesh.tp:
        experts = stage
    elif mesh.ep > 1:
        experts = make_group(store, place.expert_peers, place.rank, device, host, seconds)
    if mesh.pp > 1:
        neighbours = place.before, place.after
        links = make_links(store, mesh.num_ranks, place.rank, *neighbours, device, host, seconds)
    return Ranks(place, stage, experts, links)


def least(store: Store, name: str, place: Place, value: int) -> int:
    """The least that any rank has; all ranks ask, and wait until each of them has said its own."""
    store.set(f"{name} {place.rank}", str(value))
    return min(int(store.get(f"{name} {rank}")) for rank in range(place.mesh.num_ranks))
