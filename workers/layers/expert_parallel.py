"""Mixture of experts with the experts divided among the ranks of a stage (expert parallel).

Every rank of a stage has the hidden states of all tokens. Ranks with the same experts form a group,
and the groups divide the tokens evenly. Each group sends its tokens to the groups that own the
chosen experts (all-to-all), sums the weighted results and adds the shared expert. An all-gather
then sends all results to every rank. All ranks route all tokens, so each rank knows the message
sizes in advance.

    tokens 0 1 2 3   group 0: 0 1 ──▶ experts' owners ──▶ weighted sum, shared expert ─┐
                     group 1: 2 3 ──▶ experts' owners ──▶ weighted sum, shared expert ─┴─▶ all ranks

A token's results are summed in the order of its choices, as on a single rank. Within a group, each
rank has a slice of the intermediate features of each of the group's experts; the partial results
are summed at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.moe.routing import Routing, route
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import Buffer
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.moe import SharedExpert
from penstock.workers.parallel.collectives import ProcessGroup
from penstock.workers.parallel.mesh import MeshCoord, even_partition


@dataclass(frozen=True, slots=True)
class ExpertParallelMoE:
    """Mixture of E experts; this rank has some of the experts, either complete or as slices."""

    router: Linear
    bias: Tensor | None  # [E] float32, added when experts are chosen, but not to their weights
    routing: Routing
    experts: tuple[Mlp, ...]  # this rank's experts, or slices of experts
    shared: SharedExpert | None  # this rank's slice of the shared expert
    stacks: dict[str, Tensor] | None  # [e, in, out], if the checkpoint stacks the experts
    coord: MeshCoord
    stage: ProcessGroup
    owners: ProcessGroup | None  # one rank of each group; None if there is only one group
    load: Tensor  # [E] int64: number of tokens for which each expert was chosen since the start

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden], which is equal on all ranks, to [T, hidden]."""
        logits = self.router(x.to(self.router.weight.dtype))
        chosen, weights = route(logits, self.routing, self.bias)
        self.load.add_(torch.bincount(chosen.flatten(), minlength=len(self.load)))
        mine = self._token_range(len(x))
        out = self._mix(x, chosen, weights, mine)
        if self.shared is not None:
            out += self.shared(x[mine.start : mine.stop])
        return self._all_gather_sum(out, len(x))

    def lower(self, graph: GraphBuilder, x: Buffer, out: Buffer) -> None:
        raise UnsupportedGraph("experts divided among several ranks")

    def _token_range(self, num_tokens: int, group: int | None = None) -> range:
        coord = self.coord
        return even_partition(num_tokens, coord.mesh.ep, coord.ep_rank if group is None else group)

    def _mix(self, x: Tensor, chosen: Tensor, weights: Tensor, mine: range) -> Tensor:
        """Return the weighted sums of expert outputs for the tokens `mine` of this group."""
        top_k = chosen.shape[1]
        here = slice(mine.start, mine.stop)
        order = chosen[here].flatten().argsort(stable=True)
        rows = x[here][order // top_k]
        made = torch.empty_like(rows)
        made[order] = self._compute(rows, chosen)
        weighted = made.view(len(mine), top_k, x.shape[1]) * weights[here].to(x.dtype)[:, :, None]
        out = weighted[:, 0]
        for rank in range(1, top_k):
            out += weighted[:, rank]
        return out

    def _compute(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Run the experts of all groups on `rows` [n, D].

        `rows` has one row per token and choice of this group's tokens, sorted by expert.
        """
        num_experts = len(self.load)
        counts = torch.stack([
            torch.bincount(chosen[span.start : span.stop].flatten(), minlength=num_experts)
            for span in (
                self._token_range(len(chosen), group) for group in range(self.coord.mesh.ep)
            )
        ]).cpu()  # fmt: skip
        if self.owners is None:
            return self._run(rows, counts)
        experts = [self.coord.mesh.ep, num_experts]
        sent = [int(counts[self.coord.ep_rank, own.start : own.stop].sum())
                for own in _even_partitions(*experts)]  # fmt: skip
        own = self.coord.experts(num_experts)
        coming = counts[:, own.start : own.stop]
        received: list[int] = coming.sum(1).tolist()
        made = self._run(self.owners.all_to_all(rows, sent, received), coming)
        return self.owners.all_to_all(made, received, sent)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Run this rank's e experts.

        Args:
            rows: [n, D], the rows of all groups in order; each group's rows are sorted by expert.
            counts: [groups, e] number of rows per group and expert.
        """
        made = torch.empty_like(rows)
        ends = counts.flatten().cumsum(0).view(counts.shape).tolist()
        sizes = counts.tolist()
        for number, expert in enumerate(self.experts):
            spans = [
                torch.arange(end[number] - size[number], end[number], device=rows.device)
                for end, size in zip(ends, sizes, strict=True)
            ]
            indices = torch.cat(spans)
            if len(indices):
                made[indices] = expert(rows[indices])
        return made

    def _all_gather_sum(self, out: Tensor, num_tokens: int) -> Tensor:
        """Sum the partial results of each group's ranks; return all groups' results, [T, D]."""
        coord, most = self.coord, -(-num_tokens // self.coord.mesh.ep)
        if coord.mesh.ep == 1:
            return self.stage.all_reduce(out)
        padded = out.new_zeros(most, out.shape[1])
        padded[: len(out)] = out
        gathered = self.stage.all_gather(padded).view(coord.mesh.ep, coord.mesh.expert_tp, most, -1)
        total = gathered[:, 0].to(torch.float32, copy=True)
        for column in range(1, coord.mesh.expert_tp):
            total += gathered[:, column]
        summed = total.to(out.dtype)
        trimmed = [
            each[: len(self._token_range(num_tokens, group))] for group, each in enumerate(summed)
        ]
        return torch.cat(trimmed)


def _even_partitions(num_owners: int, num_items: int) -> Sequence[range]:
    return [even_partition(num_items, num_owners, owner) for owner in range(num_owners)]
