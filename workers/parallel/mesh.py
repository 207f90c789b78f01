"""Mesh of a worker's ranks: tensor, pipeline and expert parallel.

A worker has tp x pp ranks. Layers are divided into `pp` stages of `tp` ranks each. Heads, columns
and the vocabulary are divided among the ranks of a stage. Experts are divided among `ep` groups of
these ranks; each expert belongs to one group. (Planned: a fourth dimension, data-parallel
attention, by which `num_ranks` is multiplied as well. Experts can then be divided among more ranks
than the heads are.)

Rank 0 leads the worker and belongs to the *last* stage, where the logits are computed. Rank 0
samples the tokens and puts them into the plan of the next step, so no other rank needs a sampler.
"""

from dataclasses import dataclass


class BadShape(ValueError):
    """The numbers of ranks do not form a valid mesh, or do not suit the model's sizes."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Shape of a worker: numbers of tensor, pipeline and expert parallel ranks."""

    tp: int = 1  # ranks per stage
    pp: int = 1  # stages
    ep: int = 1  # groups of a stage's ranks among which the experts are divided

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.ep) < 1:
            raise BadShape(f"tp, pp and ep must be 1 or more, not {self.tp}, {self.pp}, {self.ep}")
        if self.tp % self.ep:
            raise BadShape(
                f"ep {self.ep} does not divide tp {self.tp}: experts are divided among the tp "
                "ranks of a stage"
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def expert_tp(self) -> int:
        """Number of ranks that share each expert."""
        return self.tp // self.ep

    def coord(self, rank: int) -> "MeshCoord":
        return MeshCoord(self, rank)


@dataclass(frozen=True, slots=True)
class MeshCoord:
    """Coordinates of one rank in the mesh."""

    mesh: Mesh = Mesh()
    rank: int = 0

    @property
    def stage(self) -> int:
        return (self.rank // self.mesh.tp - 1) % self.mesh.pp

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.mesh.pp - 1

    @property
    def tp_rank(self) -> int:
        """Index of this rank in its stage, whose ranks divide heads, columns and vocabulary."""
        return self.rank % self.mesh.tp

    @property
    def ep_rank(self) -> int:
        """Index of this rank's expert group among the `ep` groups that divide the experts."""
        return self.tp_rank // self.mesh.expert_tp

    @property
    def expert_tp_rank(self) -> int:
        """Index of this rank in its expert group, whose ranks divide each expert's features."""
        return self.tp_rank % self.mesh.expert_tp

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The ranks of this stage, including this rank."""
        first = self.rank - self.tp_rank
        return tuple(range(first, first + self.mesh.tp))

    @property
    def prev_stage(self) -> int | None:
        """The rank of the previous stage that sends hidden states to this rank, or None."""
        return None if self.is_first else self._adjacent_rank(-1)

    @property
    def next_stage(self) -> int | None:
        """The rank of the next stage that receives hidden states of this rank; None: last stage."""
        return None if self.is_last else self._adjacent_rank(1)

    def _adjacent_rank(self, step: int) -> int:
        return (self.rank + step * self.mesh.tp) % self.mesh.num_ranks

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage; the sizes of stages differ by at most one layer."""
        pp = self.mesh.pp
        return range(num_layers * self.stage // pp, num_layers * (self.stage + 1) // pp)

    def experts(self, num_experts: int) -> range:
        """Return the experts of this rank's expert group."""
        return even_partition(num_experts, self.mesh.ep, self.ep_rank)

    def tokens(self, vocab_size: int) -> range:
        """Return this rank's part of the vocabulary; the part of the last rank may be shorter."""
        size = -(-vocab_size // self.mesh.tp)
        first = min(vocab_size, self.tp_rank * size)
        return range(first, min(vocab_size, first + size))


SINGLE_COORD = MeshCoord()
"""Coordinates in a worker of one rank."""


def even_partition(num_items: int, num_owners: int, owner: int) -> range:
    """Return the range of items of one owner; the sizes of ranges differ by at most one item."""
    return range(num_items * owner // num_owners, num_items * (owner + 1) // num_owners)
