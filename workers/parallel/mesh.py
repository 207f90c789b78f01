"""Which rank of a worker does what: its place in a mesh of tensor, pipeline and expert parallel.

A worker has tp x pp ranks. Layers are cut into `pp` stages of `tp` ranks each; heads, columns and
the vocabulary are cut over a stage's ranks; experts are spread over `ep` groups of them, each
expert whole in one group. (A fourth number, data-parallel attention, is to stand beside `tp` in
`num_ranks`, and will let experts spread over more ranks than share a head.)

Rank 0 leads and is in the *last* stage, where the logits are: what is drawn there goes into the
next step's plan, and no other rank needs to know how.
"""

from dataclasses import dataclass


class BadShape(ValueError):
    """The ranks that were asked for make no mesh, or cannot have this model: why, in a line."""


@dataclass(frozen=True, slots=True)
class Mesh:
    tp: int = 1  # ranks of a stage
    pp: int = 1  # stages
    ep: int = 1  # groups of a stage's ranks that experts are spread over

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.ep) < 1:
            raise BadShape(f"tp, pp and ep must be 1 or more, not {self.tp}, {self.pp}, {self.ep}")
        if self.tp % self.ep:
            raise BadShape(
                f"ep {self.ep} does not divide tp {self.tp}: experts are spread over the tp ranks "
                "of a stage"
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert."""
        return self.tp // self.ep

    def coord(self, rank: int) -> "MeshCoord":
        return MeshCoord(self, rank)


@dataclass(frozen=True, slots=True)
class MeshCoord:
    """One rank's place in the mesh."""

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
        """Which part of heads, columns and vocabulary."""
        return self.rank % self.mesh.tp

    @property
    def ep_rank(self) -> int:
        """Which of the groups that experts are spread over."""
        return self.tp_rank // self.mesh.expert_tp

    @property
    def expert_tp_rank(self) -> int:
        """Which part of each of its experts."""
        return self.tp_rank % self.mesh.expert_tp

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The ranks of this stage, itself included."""
        first = self.rank - self.tp_rank
        return tuple(range(first, first + self.mesh.tp))

    @property
    def expert_ranks(self) -> tuple[int, ...]:
        """Of those, the ranks that have the same part of other experts, itself included."""
        return self.stage_ranks[self.expert_tp_rank :: self.mesh.expert_tp]

    @property
    def prev_stage(self) -> int | None:
        """The rank of the stage before whose hidden states come here."""
        return None if self.is_first else self._adjacent_rank(-1)

    @property
    def next_stage(self) -> int | None:
        """The rank of the next stage that hidden states go to."""
        return None if self.is_last else self._adjacent_rank(1)

    def _adjacent_rank(self, step: int) -> int:
        return (self.rank + step * self.mesh.tp) % self.mesh.num_ranks

    def layers(self, num_layers: int) -> range:
        """Those of this stage, out of all; stages differ by one layer at most."""
        pp = self.mesh.pp
        return range(num_layers * self.stage // pp, num_layers * (self.stage + 1) // pp)

    def experts(self, num_experts: int) -> range:
        """Those of this rank's group, out of all."""
        return even_partition(num_experts, self.mesh.ep, self.ep_rank)

    def tokens(self, vocab_size: int) -> range:
        """This rank's part of the vocabulary; the last one's may be shorter."""
        size = -(-vocab_size // self.mesh.tp)
        first = min(vocab_size, self.tp_rank * size)
        return range(first, min(vocab_size, first + size))


SINGLE_COORD = MeshCoord()
"""Of a rank that is alone."""


def even_partition(num_items: int, num_owners: int, owner: int) -> range:
    """What one of several owners has of things in order; they differ by one at most."""
    return range(num_items * owner // num_owners, num_items * (owner + 1) // num_owners)
