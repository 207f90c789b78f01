"""Beam search: which beams go on, which are finished, and when it is over. Pure.

Exactly as `transformers` does it, numbers in float32: of all continuations of all beams the best
`width` that end become hypotheses, the best `width` that do not end go on.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.sequence import FinishReason, Ints

Floats: TypeAlias = npt.NDArray[np.float32]
Bools: TypeAlias = npt.NDArray[np.bool_]

UNLIKELY = np.float32(-1e9)
"""Where all beams but one begin: they are alike until they have parted."""


class Node:
    """The last token of a beam, and the beam that it goes on from."""

    __slots__ = ("before", "logprobs", "token")

    def __init__(self, token: int, before: "Node | None") -> None:
        self.token = token
        self.before = before
        self.logprobs: object = None  # filled by whoever knows them

    def path(self) -> list["Node"]:
        """From the first token of the answer to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.before
        return nodes[::-1]


class Hypothesis(NamedTuple):
    """A finished beam."""

    score: np.float32  # log probability / length ** length_penalty
    last: Node
    finish: FinishReason

    @property
    def tokens(self) -> list[int]:
        return [node.token for node in self.last.path()]


class NewNode(NamedTuple):
    """A token that a turn has added: it came from this beam's logits."""

    beam: int
    node: Node


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What becomes of the beams: beam i goes on from `parents[i]` with `tokens[i]`."""

    parents: Ints  # [W] beams
    tokens: Ints  # [W]
    new_nodes: list[NewNode]
    is_finished: bool  # then nobody goes on


class BeamSearch:
    """One search, from its prompt on.

    Args:
        params: those of the search: `num_sequences` beams, of whose answers the best `n` are given.
        limit: the most tokens that an answer may have.
    """

    def __init__(self, params: SamplingParams, limit: int) -> None:
        self._params = params
        self._width = params.num_sequences
        self._limit = limit
        self._stops = np.array(sorted(params.stop_token_ids), np.int32)
        self._length = 0  # of every beam's answer
        self._scores = np.full(self._width, UNLIKELY, np.float32)
        self._scores[0] = 0
        self._beams: list[Node | None] = [None] * self._width
        self._finished: list[Hypothesis] = []  # best first, `width` at most

    @property
    def best(self) -> list[Hypothesis]:
        """The best that have finished, best first; as many as are wanted, if there are."""
        return self._finished[: self._params.n]

    @property
    def failed(self) -> bool:
        """Whether there are fewer than are wanted."""
        return len(self._finished) < self._params.n

    def advance(self, tokens: Ints, logprobs: Floats) -> BeamStep:
        """One token more for every beam.

        tokens, logprobs: [W, C] of each beam the C likeliest next tokens: `width` and as many more
        as there are stop tokens suffice. Those of -inf (or NaN) may not come.
        """
        totals = (logprobs + self._scores[:, None]).ravel()
        order = np.argsort(-totals, kind="stable")
        order = order[np.isfinite(totals[order])]
        names = tokens.ravel()[order]
        stopped = np.isin(names, self._stops)
        self._length += 1
        ended = stopped | (self._length >= self._limit)
        width, made = self._width, list[NewNode]()
        origins = order // logprobs.shape[1]
        for at in np.flatnonzero(ended[:width]).tolist():
            node = Node(int(names[at]), self._beams[origins[at]])
            finish = FinishReason.STOP if stopped[at] else FinishReason.LENGTH
            if self._add(Hypothesis(self._penalised(totals[order[at]]), node, finish)):
                made.append(NewNode(int(origins[at]), node))
        going = np.flatnonzero(~ended)[:width]
        if not going.size:
            return BeamStep(np.arange(width, dtype=np.int32), np.zeros(width, np.int32), made, True)
        return self._extend_beams(origins[going], names[going], totals[order[going]], made)

    def _extend_beams(
        self, origins: Ints, names: Ints, totals: Floats, made: list[NewNode]
    ) -> BeamStep:
        missing = self._width - len(totals)
        if missing:  # beams without a future keep their place, as shadows of the best one
            at = np.concatenate((np.arange(len(totals)), np.zeros(missing, np.intp)))
            origins, names = origins[at], names[at]
            totals = np.pad(totals, (0, missing), constant_values=-np.inf)
        parents = [self._beams[origin] for origin in origins]
        nodes = [Node(int(name), before) for name, before in zip(names, parents, strict=True)]
        made += [NewNode(int(origin), node) for origin, node in zip(origins, nodes, strict=True)]
        self._beams, self._scores = list(nodes), totals
        return BeamStep(origins.astype(np.int32), names.astype(np.int32), made, self._is_finished())

    def _penalised(self, total: np.float32, length: int | None = None) -> np.float32:
        power = (length or self._length) ** self._params.length_penalty
        return np.float32(total / np.float32(power))

    def _add(self, new: Hypothesis) -> bool:
        """Keep it if it is among the best; of equals the earlier ones."""
        position = sum(1 for old in self._finished if old.score >= new.score)
        self._finished.insert(position, new)
        del self._finished[self._width :]
        return position < self._width

    def _is_finished(self) -> bool:
        if len(self._finished) < self._width:
            return False
        if self._params.early_stopping is True:
            return True
        # What the best beam could still become, by a guess that is not always right.
        never = self._params.early_stopping == "never"
        longest = self._limit if never and self._params.length_penalty > 0 else self._length
        return not self._penalised(self._scores[0], longest) > self._finished[-1].score


# ------------------------------------------------------------------ all that run


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may come next of R rows, the likeliest first."""

    tokens: Ints  # [R, C]
    logprobs: Floats  # [R, C] of the model, with penalties; -inf: may not come


@dataclass(slots=True)
class BeamSteps:
    """What becomes of R rows, and of their searches."""

    tokens: Ints  # [R]
    parents: Ints  # [R] the rows that they go on from
    finished: list[Hashable] = field(default_factory=list)
    # A place among the rows, the token that came from its logits, and the place's key.
    new_nodes: list[tuple[int, Node]] = field(default_factory=list)


class BeamSearches:
    """The searches that run, by the key of their sequence."""

    def __init__(self) -> None:
        self._open: dict[Hashable, BeamSearch] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._open

    def open(self, key: Hashable, params: SamplingParams, limit: int) -> None:
        """Begin one; `limit` is the most tokens that its answers may have."""
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        self._open[key] = BeamSearch(params, limit)

    def close(self, key: Hashable) -> BeamSearch | None:
        """Forget one; unknown: None."""
        return self._open.pop(key, None)

    def failed(self, key: Hashable) -> bool:
        """Whether it has fewer answers than are wanted; unknown: no."""
        return key in self._open and self._open[key].failed

    def advance(self, keys: Ints, choices: Ints, rows: Ints, candidates: Candidates) -> BeamSteps:
        """Let every search take its turn.

        keys (objects), choices, rows: [R] whose row, which beam of it, which row. Those of a search
        that is closed stay as they are.
        """
        steps = BeamSteps(np.zeros_like(rows), rows.copy())
        for key, indices in _by_key(keys, choices):
            search = self._open.get(key)
            if search is None:
                continue
            step = search.advance(candidates.tokens[indices], candidates.logprobs[indices])
            steps.tokens[indices] = step.tokens
            steps.parents[indices] = rows[indices[step.parents]]
            steps.new_nodes += [(int(indices[made.beam]), made.node) for made in step.new_nodes]
            if step.is_finished:
                steps.finished.append(key)
        return steps


def _by_key(keys: Ints, choices: Ints) -> Iterator[tuple[Hashable, npt.NDArray[np.intp]]]:
    """The places of each key's beams, in their order."""
    indices: dict[Hashable, list[int]] = {}
    for at in np.argsort(choices, kind="stable").tolist():
        indices.setdefault(keys[at], []).append(at)
    for key, of_key in indices.items():
        yield key, np.array(of_key, np.intp)
