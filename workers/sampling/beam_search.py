"""Beam search: decides which beams continue or finish, and when a search ends. Pure code.

The results are exactly those of `transformers` with float32 scores. All continuations of all beams
are ranked together. A continuation that ends becomes a hypothesis (finished beam) if it is among
the best `width`. The best `width` continuations that do not end become the next beams.
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
"""Initial score of all beams except the first. All beams of a prompt are equal at first; with this
score, the first step continues only the first beam."""


class Node:
    """A token of a beam's answer, with a link to the previous token."""

    __slots__ = ("before", "logprobs", "token")

    def __init__(self, token: int, before: "Node | None") -> None:
        self.token = token
        self.before = before
        # logprobs of the token; set by the beam sampler if they were requested
        self.logprobs: object = None

    def path(self) -> list["Node"]:
        """Return the nodes from the first token of the answer to this node, inclusive."""
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
    """A token that a step has added to a beam or hypothesis."""

    beam: int  # number of the beam whose logits the token was chosen from
    node: Node


@dataclass(frozen=True, slots=True)
class BeamStep:
    """Result of one step of W beams: beam i continues beam `parents[i]` with token `tokens[i]`."""

    parents: Ints  # [W] number of the previous beam that each beam continues
    tokens: Ints  # [W]
    new_nodes: list[NewNode]
    is_finished: bool  # True if the search has ended, so that no beam continues


class BeamSearch:
    """One beam search for one prompt.

    Args:
        params: `num_sequences` is the number of beams, `n` the number of answers to return.
        limit: maximum number of tokens of an answer.
    """

    def __init__(self, params: SamplingParams, limit: int) -> None:
        self._params = params
        self._width = params.num_sequences
        self._limit = limit
        self._stops = np.array(sorted(params.stop_token_ids), np.int32)
        self._length = 0  # number of tokens of each beam's answer; equal for all beams
        self._scores = np.full(self._width, UNLIKELY, np.float32)
        self._scores[0] = 0
        self._beams: list[Node | None] = [None] * self._width
        # the best finished beams, best first; at most `width`
        self._finished: list[Hypothesis] = []

    @property
    def best(self) -> list[Hypothesis]:
        """The `n` best hypotheses (or fewer if fewer are finished), best first."""
        return self._finished[: self._params.n]

    @property
    def failed(self) -> bool:
        """True if there are fewer than `n` hypotheses."""
        return len(self._finished) < self._params.n

    def advance(self, tokens: Ints, logprobs: Floats) -> BeamStep:
        """Extend every beam by one token.

        Args:
            tokens: [W, C] the C most likely next tokens of each beam. C must be at least W plus the
                number of stop tokens.
            logprobs: [W, C] log probabilities of `tokens`; -inf or NaN excludes a token.
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
        """Replace the beams by the best continuations.

        Args:
            origins: for each continuation, best first, the number of the beam that it continues.
            names: the new token of each continuation.
            totals: the score of each continuation.
            made: the nodes that the step has added to hypotheses; the nodes of the new beams are
                appended to this list.
        """
        missing = self._width - len(totals)
        if missing:  # Fill the missing beams with copies of the best continuation, with score -inf.
            at = np.concatenate((np.arange(len(totals)), np.zeros(missing, np.intp)))
            origins, names = origins[at], names[at]
            totals = np.pad(totals, (0, missing), constant_values=-np.inf)
        parents = [self._beams[origin] for origin in origins]
        nodes = [Node(int(name), before) for name, before in zip(names, parents, strict=True)]
        made += [NewNode(int(origin), node) for origin, node in zip(origins, nodes, strict=True)]
        self._beams, self._scores = list(nodes), totals
        return BeamStep(origins.astype(np.int32), names.astype(np.int32), made, self._is_finished())

    def _penalised(self, total: np.float32, length: int | None = None) -> np.float32:
        """Return `total` divided by the answer's length to the power of `length_penalty`."""
        power = (length or self._length) ** self._params.length_penalty
        return np.float32(total / np.float32(power))

    def _add(self, new: Hypothesis) -> bool:
        """Keep a hypothesis if it is among the best `width`; return True if it was kept.

        Of two hypotheses with equal scores, the earlier one ranks first.
        """
        position = sum(1 for old in self._finished if old.score >= new.score)
        self._finished.insert(position, new)
        del self._finished[self._width :]
        return position < self._width

    def _is_finished(self) -> bool:
        if len(self._finished) < self._width:
            return False
        if self._params.early_stopping is True:
            return True
        # Estimate the best score that a running beam can still reach.
        # The estimate is not exact, because results must equal those of `transformers`.
        never = self._params.early_stopping == "never"
        longest = self._limit if never and self._params.length_penalty > 0 else self._length
        return not self._penalised(self._scores[0], longest) > self._finished[-1].score


# ------------------------------------------------------------------ Steps of all running searches


@dataclass(frozen=True, slots=True)
class Candidates:
    """The C candidates for the next token of each of R beams, most likely first."""

    tokens: Ints  # [R, C]
    logprobs: Floats  # [R, C] log probabilities after penalties; -inf: excluded


@dataclass(slots=True)
class BeamSteps:
    """Result of one step of all searches, which have R beams in total."""

    tokens: Ints  # [R] new token of each beam
    parents: Ints  # [R] row of the sequence table that each beam continues
    finished: list[Hashable] = field(default_factory=list)  # keys of the searches that ended
    # New tokens, each with the index in [0, R) of the beam whose logits it was chosen from.
    new_nodes: list[tuple[int, Node]] = field(default_factory=list)


class BeamSearches:
    """The running beam searches, by the key that all sequences of a search share."""

    def __init__(self) -> None:
        self._open: dict[Hashable, BeamSearch] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._open

    def open(self, key: Hashable, params: SamplingParams, limit: int) -> None:
        """Start a search; `limit` is the maximum number of tokens of an answer."""
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        self._open[key] = BeamSearch(params, limit)

    def close(self, key: Hashable) -> BeamSearch | None:
        """Remove and return a search; return None if the key is unknown."""
        return self._open.pop(key, None)

    def failed(self, key: Hashable) -> bool:
        """Return `BeamSearch.failed` of a search; False if the key is unknown."""
        return key in self._open and self._open[key].failed

    def advance(self, keys: Ints, choices: Ints, rows: Ints, candidates: Candidates) -> BeamSteps:
        """Advance every search by one step.

        Args:
            keys: [R] key of each beam's search (dtype object).
            choices: [R] number of each beam within its search.
            rows: [R] row of each beam in the sequence table.
            candidates: candidates for the next token of each beam.

        A beam whose search is closed gets token 0, and its parent is its own row.
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
    """Yield each search's key with the indices of its beams, in the order of `choices`."""
    indices: dict[Hashable, list[int]] = {}
    for at in np.argsort(choices, kind="stable").tolist():
        indices.setdefault(keys[at], []).append(at)
    for key, of_key in indices.items():
        yield key, np.array(of_key, np.intp)
