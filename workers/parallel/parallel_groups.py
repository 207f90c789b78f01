"""The communication groups of one rank of a worker."""

from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from penstock.workers.parallel.collectives import (
    ProcessGroup,
    StageLinks,
    make_process_group,
    make_stage_links,
)
from penstock.workers.parallel.mesh import SINGLE_COORD, MeshCoord


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """A rank's coordinates and its groups; each group is None if the rank would be alone in it."""

    coord: MeshCoord = SINGLE_COORD
    stage: ProcessGroup | None = None  # the ranks of this rank's stage
    links: StageLinks | None = None  # connection to the previous and next stage


SINGLE_RANK = ParallelGroups()


def connect_ranks(
    coord: MeshCoord,
    store: Store,
    device: torch.device,
    host: str,
    seconds: float,
    in_rank_order: bool = True,
) -> ParallelGroups:
    """Connect the ranks of a worker; raise `RankLost` if a connection fails.

    Args:
        seconds: Timeout of each later operation between the ranks.
        in_rank_order: Whether all-reduces add in rank order; see `ProcessGroup`.
    """
    mesh = coord.mesh
    stage = links = None
    if mesh.tp > 1:
        stage = make_process_group(
            store, coord.stage_ranks, coord.rank, device, host, seconds, in_rank_order
        )
    if mesh.pp > 1:
        adjacent = coord.prev_stage, coord.next_stage
        links = make_stage_links(
            store, mesh.num_ranks, coord.rank, *adjacent, device, host, seconds
        )
    return ParallelGroups(coord, stage, links)


def all_reduce_min(store: Store, name: str, coord: MeshCoord, value: int) -> int:
    """Return the minimum of all ranks' values. All ranks must call this and wait for each other."""
    store.set(f"{name} {coord.rank}", str(value))
    return min(int(store.get(f"{name} {rank}")) for rank in range(coord.mesh.num_ranks))
