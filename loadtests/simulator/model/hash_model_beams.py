"""Beam search over the hash model.

The hash of a beam determines the probabilities of its next token.
"""

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.simulator.model.hash_model import VOCAB, draw, hash_of, slot_value
from penstock.workers.sampling.beam_search import BeamSearch, BeamSearches, Candidates
from penstock.workers.scheduling.sequence import (
    BeamRows,
    FinishReason,
    Ints,
    NewSequence,
    StepPlan,
)
from penstock.workers.scheduling.table import SequenceTable

Answer: TypeAlias = tuple[list[int], FinishReason]


def _candidates(hashes: Sequence[int], held_back: Sequence[Sequence[int]]) -> Candidates:
    """Return the log probabilities [R, VOCAB] of the beams' next tokens, given `hashes` [R].

    The tokens in `held_back[r]` get -inf in row r.
    """
    tokens = np.tile(np.arange(VOCAB, dtype=np.int32), (len(hashes), 1))
    # Make the log probabilities differ much, so that the search often replaces beams.
    logprobs = [
        [-((hashed >> 9) * (token + 3) ** 3 % 1009) / 64 for token in range(VOCAB)]
        for hashed in hashes
    ]
    scores = np.array(logprobs, np.float32).reshape(-1, VOCAB)
    for row, banned in enumerate(held_back):
        scores[row, list(banned)] = -np.inf
    return Candidates(tokens, scores)


def _held_back(params: SamplingParams, length: int) -> tuple[int, ...]:
    return params.stop_token_ids if length < params.min_tokens else ()


class HashModelBeams:
    """The beam searches of an engine that runs a hash model."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._searches = BeamSearches()
        self._params: dict[Hashable, SamplingParams] = {}

    def open(self, new: NewSequence) -> None:
        """Start the search of a submitted sequence.

        Does nothing for a sequence without beam search.
        """
        if new.params.use_beam_search:
            self._params[new.key] = new.params
            self._searches.open(new.key, new.params, self._max_model_len - new.num_prompt)

    def close(self, key: Hashable) -> list[Answer]:
        """End the search of `key` and return the answers so far, or [] if the key is unknown."""
        self._params.pop(key, None)
        search = self._searches.close(key)
        return [] if search is None else [(each.tokens, each.finish) for each in search.best]

    def draw(
        self, plan: StepPlan, table: SequenceTable, hashes: Sequence[int]
    ) -> tuple[Ints, BeamRows | None, list[Hashable]]:
        """Sample the tokens of a step.

        Returns:
            Tokens [S] of the sampling rows, the beams among these rows (None if there are none),
            and the keys of the searches that have finished.
        """
        rows = plan.sampling_rows
        drawn = draw(hashes, plan, table.choices)
        at = np.flatnonzero([key in self._params for key in table.keys[rows].tolist()])
        if not at.size:
            return drawn, None, []
        beams = rows[at]
        lengths = (table.num_tokens - table.num_prompt)[beams].tolist()
        held_back = [
            _held_back(self._params[key], length)
            for key, length in zip(table.keys[beams].tolist(), lengths, strict=True)
        ]
        step = self._searches.advance(
            table.keys[beams],
            table.choices[beams],
            beams,
            _candidates([hashes[index] for index in at.tolist()], held_back),
        )
        drawn[at] = step.tokens
        return drawn, BeamRows(beams, step.parents), step.finished


def reference_beams(
    prompt: Sequence[int], params: SamplingParams, max_model_len: int
) -> list[Answer]:
    """Run a beam search on plain token lists and return its answers.

    No blocks and batches are used.
    """
    search = BeamSearch(params, params.answer_limit(len(prompt), max_model_len))
    values: list[int] = []
    for token in prompt:
        values.append(slot_value(values[-1] if values else 0, token, len(values)))
    beams = [values] * params.num_sequences
    while True:
        held_back = [_held_back(params, len(beams[0]) - len(prompt))] * len(beams)
        candidates = _candidates([hash_of(beam) for beam in beams], held_back)
        step = search.advance(candidates.tokens, candidates.logprobs)
        if step.is_finished:
            return [(each.tokens, each.finish) for each in search.best]
        beams = [
            [*beams[parent], slot_value(beams[parent][-1], token, len(beams[parent]))]
            for parent, token in zip(step.parents.tolist(), step.tokens.tolist(), strict=True)
        ]
