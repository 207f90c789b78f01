"""Runs the model once over a step's ragged batch."""

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention import plan_attention
from penstock.kernels.blocks import copy_blocks
from penstock.kernels.cache import write_rows
from penstock.kernels.in_place import InPlace
from penstock.kernels.latent_attention import LatentPlan, plan_latent_attention
from penstock.kernels.rotary import rotary_table
from penstock.workers.kv_cache import KvCache
from penstock.workers.layers.attention import StepInputs
from penstock.workers.models.served import ServedModel
from penstock.workers.scheduling.sequence import Ints, StepPlan

FIRST_POSITIONS = 64
"""Rows of the rotary table at first."""


class Runner:
    """A model with its cache: turns step plans into logits.

    deterministic: every token attends by the path that decoding takes.
    """

    def __init__(self, decoder: ServedModel, cache: KvCache, deterministic: bool = False) -> None:
        self.decoder = decoder
        self.cache = cache
        self._one_path = deterministic
        self._latent = decoder.spec.latent
        self._windows = set() if self._latent else set(decoder.spec.windows)
        self._rotary = self._tables(FIRST_POSITIONS)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """Copies the plan's blocks, computes its tokens and writes their keys and values.

        Returns [S + P, vocab_size] float32: the logits that each of the plan's drawing rows draws
        from, then those after each of its scored tokens.
        """
        decoder, cache = self.decoder, self.cache.data
        if len(plan.copies):
            copy_blocks(cache, self._put(plan.copies[:, 0]), self._put(plan.copies[:, 1]))
        hidden = decoder(self._put(plan.tokens), self._inputs(plan), cache)
        last = plan.query_starts[1:][plan.samples] - 1
        wanted = np.concatenate((last, plan.scored))
        if len(last) < len(hidden) or len(plan.scored):
            hidden = hidden[self._put(wanted)]
        logits = decoder.logits(hidden)
        if len(plan.forks):
            forked = logits[self._put(plan.forks[:, 0])]
            logits = torch.cat((logits[: len(last)], forked, logits[len(last) :]))
        return logits

    def _inputs(self, plan: StepPlan) -> StepInputs:
        layer = self.cache.data[0]
        positions = self._put(plan.positions)
        batch = (plan.query_starts, plan.context_lens, plan.block_tables)
        return StepInputs(
            positions=positions,
            cos_sin=self._cos_sin(positions, int(plan.positions.max()) + 1),
            cache_rows=write_rows(self._put(plan.slots), layer.shape),
            plans={w: plan_attention(*batch, layer, w, self._one_path) for w in self._windows},
            latent=self._latent_plan(*batch),
        )

    def _latent_plan(
        self, query_starts: Ints, context_lens: Ints, block_tables: Ints
    ) -> LatentPlan | InPlace | None:
        batch, latent = (query_starts, context_lens, block_tables), self._latent
        if latent is None:
            return None
        if self._one_path:
            return InPlace.of(np.arange(len(context_lens)), *batch, window=0)
        return plan_latent_attention(*batch, self.cache.data[0], latent.rank, latent.up_dim)

    def _cos_sin(self, positions: Tensor, needed: int) -> tuple[Tensor, ...]:
        if self._rotary and needed > len(self._rotary[0]):
            # Made as sequences grow: a table of all positions of a long model takes a gigabyte.
            size = 1 << (needed - 1).bit_length()
            self._rotary = self._tables(size)
        return tuple(table.index_select(0, positions) for table in self._rotary)

    def _tables(self, size: int) -> tuple[Tensor, ...]:
        decoder = self.decoder
        return tuple(
            rotary_table(rotary.frequencies, size, decoder.dtype, rotary.scale, rotary.neighbours)
            for rotary in decoder.rotaries
        )

    def _put(self, array: Ints) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.decoder.device)
