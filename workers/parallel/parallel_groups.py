"""What a rank shares with the other ranks of its worker."""

from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from penstock.workers.parallel.groups import (
    ProcessGroup,
    StageLinks,
    make_process_group,
    make_stage_links,
)
from penstock.workers.parallel.mesh import SINGLE_COORD, MeshCoord


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """Its place among them, and what they do together; alone: nothing."""

    coord: MeshCoord = SINGLE_COORD
    stage: ProcessGroup | None = None  # the ranks of its stage, if it is not the only one
    experts: ProcessGroup | None = None  # those of them that have other experts, if there are any
    links: StageLinks | None = None  # to other stages, if there are any


SINGLE_RANK = ParallelGroups()


def connect_ranks(
    coord: MeshCoord, store: Store, device: torch.device, host: str, seconds: float
) -> ParallelGroups:
    """Meet the others; `RankLost` if they do not come.

    seconds: the longest that an operation with the others may take, from then on.
    """
    mesh = coord.mesh
    stage = experts = links = None
    if mesh.tp > 1:
        stage = make_process_group(store, coord.stage_ranks, coord.rank, device, host, seconds)
    if mesh.ep == mesh.tp:
        experts = stage
    elif mesh.ep > 1:
        experts = make_process_group(store, coord.expert_ranks, coord.rank, device, host, seconds)
    if mesh.pp > 1:
        adjacent = coord.prev_stage, coord.next_stage
        links = make_stage_links(
            store, mesh.num_ranks, coord.rank, *adjacent, device, host, seconds
        )
    return ParallelGroups(coord, stage, experts, links)


def all_reduce_min(store: Store, name: str, coord: MeshCoord, value: int) -> int:
    """The least that any rank has; all ranks ask, and wait until each of them has said its own."""
    store.set(f"{name} {coord.rank}", str(value))
    return min(int(store.get(f"{name} {rank}")) for rank in range(coord.mesh.num_ranks))
