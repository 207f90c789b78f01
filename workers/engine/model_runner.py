"""The model runner: computes the logits of a step's ragged batch in one run of the model."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention.cpu_plan import CpuPagedPlan
from penstock.kernels.attention.op import plan_attention
from penstock.kernels.kv_cache.block_copy import copy_blocks
from penstock.kernels.kv_cache.op import slot_rows
from penstock.kernels.mla.op import MlaPlan, plan_mla
from penstock.kernels.rope.op import rotary_table
from penstock.kernels.triton_common.launch import runs_kernels
from penstock.workers.gpu.pinned import put
from penstock.workers.layers.attention import StepInputs
from penstock.workers.models.cpu_step_graph import build_cpu_step_graph
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.protocols import Model
from penstock.workers.rank.kv_cache import KvCache
from penstock.workers.scheduling.sequence import Ints, StepPlan

FIRST_POSITIONS = 64
"""Initial number of rows of the rotary tables."""


SCORED_ROWS = 128
"""Maximum number of prompt tokens whose logits are computed together, to bound the memory."""


class ModelRunner:
    """A model with its KV cache: computes the logits of step plans.

    Args:
        decoder: the model.
        cache: this rank's KV cache.
        deterministic: use attention that is batch invariant.
        num_positions: initial number of rows of the rotary tables; the tables grow on demand.
    """

    def __init__(
        self,
        decoder: Model,
        cache: KvCache,
        deterministic: bool = False,
        num_positions: int = FIRST_POSITIONS,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self._batch_invariant = deterministic
        self._latent = decoder.spec.latent
        self._windows = set() if self._latent else set(decoder.spec.windows)
        self._rope_tables = self._make_rope_tables(num_positions)
        self._step_graph = build_cpu_step_graph(decoder, cache)
        # The model's output for the scored tokens of the newest step, and the function that
        # computes logits from a slice of this output.
        self._unscored: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        drawn: Tensor | None = None,
        beside: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run the model for a step: copy blocks, compute logits, and write the KV of the tokens.

        Args:
            plan: the plan of the step.
            drawn: [T] tokens of the step, if the plan was made ahead and has no tokens yet.
            beside: starts work on other threads; called once, before the longest computation that
                releases the GIL.

        Returns:
            [S, vocab_size] float32 logits of the plan's sampling rows, valid until the next step.
            If the plan has scored tokens, `prompt_logits` must be exhausted before the next step.
        """
        if len(plan.copies):
            sources, targets = self._put(plan.copies[:, 0]), self._put(plan.copies[:, 1])
            copy_blocks(self.cache.data, sources, targets)
        if self._step_graph is not None and self._step_graph.supports(plan):
            tokens = plan.tokens if drawn is None else drawn.numpy()
            rotary = self._grow_rope_tables(int(plan.positions.max()) + 1)
            made = self._step_graph.run(plan, tokens, rotary, beside)
            finish: Callable[[Tensor], Tensor] = _identity
        else:
            if beside is not None:
                beside()
            made, finish = self._hidden(plan, drawn), self.decoder.logits
        if len(plan.scored):
            self._unscored = made[self._put(plan.scored)], finish
        return self._append_forks(plan, finish(self._select_logit_rows(plan, made)))

    @torch.inference_mode()
    def prompt_logits(self) -> Iterator[Tensor]:
        """Yield the logits of the newest step's P scored tokens, in slices to bound the memory.

        All ranks must call this for the same steps, because the ranks compute logits together.

        Yields:
            [SCORED_ROWS or less, vocab_size] float32; in total P rows.
        """
        if self._unscored is None:
            return
        (made, finish), self._unscored = self._unscored, None
        for part in torch.split(made, SCORED_ROWS):
            yield finish(part)

    def broadcast_tokens(self, tokens: Tensor) -> Tensor:
        """Broadcast the tokens [T] of a step planned ahead from rank 0 to all ranks of its stage.

        `tokens` is on the device. It is overwritten on ranks other than 0, and returned. All ranks
        of the stage must call this before they run a step planned ahead.
        """
        stage = self.decoder.ranks.stage if isinstance(self.decoder, Decoder) else None
        return tokens if stage is None else stage.broadcast(tokens)

    def _hidden(self, plan: StepPlan, drawn: Tensor | None) -> Tensor:
        """Return the hidden states [T, hidden_size]; valid until the next step."""
        tokens = self._put(plan.tokens) if drawn is None else drawn
        return self.decoder(tokens, self._inputs(plan), self.cache.data)

    def _select_logit_rows(self, plan: StepPlan, made: Tensor) -> Tensor:
        """Return the rows of `made` [T, ...] for the last token of each sequence that samples."""
        last = plan.query_starts[1:][plan.samples] - 1
        return made if len(last) == len(made) else made[self._put(last)]

    def _append_forks(self, plan: StepPlan, logits: Tensor) -> Tensor:
        """Append, for each fork of the step, a copy of the logits of the choice that is forked."""
        if not len(plan.forks):
            return logits
        return torch.cat((logits, logits[self._put(plan.forks[:, 0])]))

    def _inputs(self, plan: StepPlan) -> StepInputs:
        layer = self.cache.data[0]
        positions = self._put(plan.positions)
        self._grow_rope_tables(int(plan.positions.max()) + 1)
        batch = (plan.query_starts, plan.context_lens, plan.block_tables)
        return StepInputs(
            positions=positions,
            cos_sin=self._rope_rows(positions),
            cache_rows=self._cache_rows(self._put(plan.slots)),
            plans={
                window: plan_attention(
                    *batch, layer, window, self._batch_invariant, not self._batch_invariant
                )
                for window in self._windows
            },
            latent=self._latent_plan(*batch),
        )

    def _latent_plan(
        self, query_starts: Ints, context_lens: Ints, block_tables: Ints
    ) -> MlaPlan | CpuPagedPlan | None:
        batch, latent = (query_starts, context_lens, block_tables), self._latent
        if latent is None:
            return None
        data = self.cache.data
        if self._batch_invariant and not runs_kernels(data.device):
            return CpuPagedPlan.of(np.arange(len(context_lens)), *batch, window=0)
        return plan_mla(*batch, data[0], latent.rank, latent.up_dim, self._batch_invariant)

    def _grow_rope_tables(self, needed: int) -> tuple[Tensor, ...]:
        """Return the rotary tables, enlarged to at least `needed` positions."""
        if self._rope_tables and needed > len(self._rope_tables[0]):
            # The tables grow on demand, because tables for a long context would take a gigabyte.
            size = 1 << (needed - 1).bit_length()
            self._rope_tables = self._make_rope_tables(size)
        return self._rope_tables

    def _rope_rows(self, positions: Tensor) -> tuple[Tensor, ...]:
        return tuple(table.index_select(0, positions) for table in self._rope_tables)

    def _cache_rows(self, slots: Tensor) -> Tensor:
        return slot_rows(slots, self.cache.data.shape[1:])

    def _make_rope_tables(self, size: int) -> tuple[Tensor, ...]:
        decoder = self.decoder
        return tuple(
            rotary_table(rotary.frequencies, size, decoder.dtype, rotary.scale, rotary.interleaved)
            for rotary in decoder.rotaries
        )

    def _put(self, array: Ints) -> Tensor:
        return put(array.astype(np.int64), self.decoder.device)


def _identity(logits: Tensor) -> Tensor:
    return logits
