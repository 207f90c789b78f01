"""Sampling of beams: for the rows that are beams, the beam searches choose the next tokens."""

from dataclasses import replace

import numpy as np
from torch import Tensor

from penstock.workers.sampling.beam_search import BeamSearches, Candidates
from penstock.workers.sampling.sampler import Sampled, Sampler
from penstock.workers.scheduling.sequence import BeamRows, Ints
from penstock.workers.scheduling.table import SequenceTable


class BeamSampler:
    """Advances all beam searches by a step, and computes logprobs of chosen tokens if requested."""

    def __init__(self, searches: BeamSearches, sampler: Sampler) -> None:
        self._searches = searches
        self._sampler = sampler

    def advance(
        self,
        sampled: Sampled,
        candidates: Candidates,
        logits: Tensor,
        rows: Ints,
        table: SequenceTable,
    ) -> Sampled:
        """Choose the next beams of every search.

        Args:
            sampled: result of sampling; the tokens of its beams are set in place.
            candidates: candidates of the beams of `sampled`.
            logits: [S or more, V]; the first S rows belong to `rows`.
            rows: [S] sequence-table row of each row of logits.
            table: the sequence table.
        """
        at = sampled.beams
        beams = rows[at]
        keys = table.keys[beams]
        steps = self._searches.advance(keys, table.choices[beams], beams, candidates)
        sampled.tokens[at] = steps.tokens
        for key in steps.finished:
            if self._searches.failed(key):
                # `keys == key` would compare the elements of `key` if it is a tuple.
                is_failed = np.fromiter((each == key for each in keys), np.bool_, len(keys))
                sampled.finite[at[is_failed]] = False
        counts = self._sampler.num_logprobs(beams)
        requested = [(index, node) for index, node in steps.new_nodes if counts[index] >= 0]
        if requested:
            indices = [index for index, _ in requested]
            tokens = np.array([node.token for _, node in requested], np.int32)
            entries = self._sampler.score(logits[at[indices]], counts[indices], tokens)
            for (_, node), entry in zip(requested, entries, strict=True):
                node.logprobs = entry
        return replace(
            sampled, beam_rows=BeamRows(beams, steps.parents), finished_searches=steps.finished
        )
