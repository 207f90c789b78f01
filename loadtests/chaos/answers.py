"""Records answers as clients receive them, and compares them with reference answers."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from penstock.loadtests.chaos.request_mix import SCHEMA, TOOL_CHOICES, ChaosRequest
from penstock.protos import inference_pb2 as pb

Scores = tuple[float, int, tuple[tuple[int, float], ...]]
"""Log probability and rank of the chosen token, and the top tokens with their log probabilities."""

ROUNDING = 1e-3
"""Largest accepted difference of one token's log probability between two runs.

A difference is possible because the batches of the two runs may differ.
"""


COMPLETE = ("stop", "tool_calls")
"""Finish reasons of answers that were not cut off."""


@dataclass(slots=True)
class ToolCall:
    """One tool call of an answer."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """One choice of an answer."""

    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    stopped_by: str = ""
    num_received: int = 0  # number of positions received in the current call
    calls: dict[int, ToolCall] = field(default_factory=dict)  # tool calls by their index

    def take(self, reply: pb.GenerateReply) -> Iterator[str]:
        """Record a reply and yield a message for each error found in it."""
        if self.finish:
            yield "a reply came after the finish reason"
        if reply.tokens and reply.position != self.num_received:
            yield (
                f"expected a reply that begins at position {self.num_received}, received one that "
                f"begins at {reply.position}"
            )
        yield from self._add_tokens(reply.tokens)
        self.scores += map(_scores, reply.logprobs)
        self.text += reply.text
        self.finish, self.stopped_by = reply.finish_reason, reply.stop_reason

    def take_chunk(self, chunk: Mapping[str, Any]) -> Iterator[str]:
        """Record a choice of a chat completion's chunk and yield a message for each error found."""
        delta = chunk["delta"]
        if self.finish:
            yield "a chunk came after the finish reason"
        yield from self._add_tokens(chunk.get("token_ids") or ())
        self.text += delta.get("content") or ""
        for piece in delta.get("tool_calls") or ():
            is_new = piece["index"] not in self.calls
            call = self.calls.setdefault(piece["index"], ToolCall())
            if is_new != ("id" in piece):
                yield (
                    f"the pieces of tool call {piece['index']} have no id, or more than one: "
                    "expected an id in the first piece only"
                )
            call.id += piece.get("id", "")
            call.name += piece["function"].get("name", "")
            call.arguments += piece["function"].get("arguments", "")
        self.finish = chunk.get("finish_reason") or ""

    def restart(self) -> None:
        """Reset the state of the call for a retry.

        The retry must repeat the tokens that were already received.
        """
        self.scores, self.text, self.finish, self.num_received = [], "", "", 0
        self.calls = {}

    def _add_tokens(self, tokens: Sequence[int]) -> Iterator[str]:
        for token in tokens:
            if self.num_received == len(self.tokens):
                self.tokens.append(token)
            elif self.tokens[self.num_received] != token:
                yield (
                    f"after a retry, the token at position {self.num_received} differs from the "
                    "token that came before the retry"
                )
            self.num_received += 1


@dataclass(slots=True)
class Stream:
    """One request of one client, including its retries. Times are Unix timestamps in seconds."""

    name: str
    request: ChaosRequest
    began: float
    ended: float = float("inf")
    # Arrival time of each reply that has tokens.
    arrivals: list[float] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    error: str = ""  # error that ended the request, or empty without an error

    def take(self, reply: pb.GenerateReply, now: float) -> None:
        """Record a reply and the errors found in it."""
        choice = self.choices.setdefault(reply.choice, Choice())
        if reply.tokens:
            self.arrivals.append(now)
        self.problems += choice.take(reply)

    def take_chunk(self, chunk: Mapping[str, Any], now: float) -> None:
        """Record a chunk of a chat completion and the errors found in it."""
        for each in chunk["choices"]:
            if each.get("token_ids"):
                self.arrivals.append(now)
            self.problems += self.choices.setdefault(each["index"], Choice()).take_chunk(each)

    @property
    def num_complete_forms(self) -> int:
        """Number of complete choices of a constrained answer; 0 without a constraint."""
        complete = [choice for choice in self.choices.values() if choice.finish in COMPLETE]
        return len(complete) if self.request.is_constrained else 0

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices.values())


@dataclass(frozen=True, slots=True)
class Divergence:
    """First position at which the tokens of an answer and its reference differ.

    The test accepts the difference if the scores of the two tokens nearly tie.
    """

    request: ChaosRequest
    choice: int
    before: tuple[int, ...]  # tokens of the answer before the different token
    right: int  # token id in the reference
    wrong: int  # token id in the received answer


def compare(stream: Stream, right: Stream, exact: bool) -> tuple[list[str], list[Divergence]]:
    """Compare a complete answer with its reference.

    Args:
        exact: whether the answer must be bitwise identical. If False, nothing after the first
            different token is compared. A constrained answer that has a different token is checked
            for its form only, because one of two nearly tied tokens often lacks a log probability.

    Returns:
        The errors, and (unless `exact`) the first different token of each choice.
    """
    problems, divergences = list(stream.problems), []
    if stream.choices.keys() != right.choices.keys():
        problems.append(f"choices {sorted(stream.choices)}, not {sorted(right.choices)}")
    for number, choice in stream.choices.items():
        known = right.choices.get(number)
        if known is None:
            continue
        if stream.request.is_constrained:
            problems += (f"choice {number}: {each}" for each in form_errors(stream.request, choice))
        divergence = _divergence(stream.request, number, choice, known)
        if divergence is not None and not exact:
            divergences += [] if stream.request.is_constrained else [divergence]
        elif (difference := _difference(choice, known, exact)) is not None:
            problems.append(f"choice {number}: {difference}")
    return problems, divergences


def _divergence(
    request: ChaosRequest, number: int, choice: Choice, known: Choice
) -> Divergence | None:
    pairs = zip(choice.tokens, known.tokens, strict=False)
    for position, (own, right) in enumerate(pairs):
        if own != right:
            return Divergence(request, number, tuple(known.tokens[:position]), right, own)
    return None


def _difference(choice: Choice, known: Choice, exact: bool) -> str | None:
    if choice.tokens != known.tokens:
        return (
            f"the answer has other tokens than the reference ({len(choice.tokens)} tokens; "
            f"reference: {len(known.tokens)})"
        )
    if _without_ids(choice) != _without_ids(known):
        return "the tool calls differ from those of the reference"
    for name in ("text", "finish", "stopped_by"):
        if getattr(choice, name) != getattr(known, name):
            return (
                f"{name} is {getattr(choice, name)!r}, but {getattr(known, name)!r} in the "
                "reference"
            )
    if len(choice.scores) != len(known.scores):
        return (
            f"the answer has {len(choice.scores)} log probabilities, but the reference has "
            f"{len(known.scores)}"
        )
    for position, (own, right) in enumerate(zip(choice.scores, known.scores, strict=True)):
        if (own != right) if exact else abs(own[0] - right[0]) > ROUNDING:
            return (
                f"the log probabilities at position {position} differ from those of the reference"
            )
    return None


def _without_ids(choice: Choice) -> Sequence[tuple[int, str, str]]:
    """Return the tool calls of a choice without their ids, which depend on the request's id."""
    return [(index, each.name, each.arguments) for index, each in choice.calls.items()]


def form_errors(request: ChaosRequest, choice: Choice) -> Iterator[str]:
    """Yield a message for each violation of the request's constraint.

    Yields nothing if the choice was cut off.
    """
    if choice.finish not in COMPLETE:
        return
    if "regex" in request.sampling:
        if re.fullmatch(request.sampling["regex"], choice.text) is None:
            yield f"the answer {choice.text!r} does not match the regex of the request"
        return
    if request.kind in TOOL_CHOICES and (choice.text or not choice.calls):
        yield (
            f"the answer has {len(choice.calls)} tool calls and the text {choice.text!r}: "
            "expected at least one call and no text"
        )
    calls = [each.arguments for each in choice.calls.values()]
    for text in calls if request.kind in TOOL_CHOICES else [choice.text]:
        try:
            jsonschema.validate(json.loads(text), SCHEMA)
        except (ValueError, jsonschema.ValidationError) as error:
            yield f"{text!r} is not valid: {str(error).splitlines()[0]}"


def near_tie(divergence: Divergence, scores: Scores, noise: Mapping[int, float]) -> float | None:
    """Return the difference of the two tokens' scores, or None if one of them is not a top token.

    A score is the log probability minus penalties, divided by the temperature, plus noise.

    Args:
        scores: log probabilities at the position of the difference, computed without faults.
        noise: sampling noise by token id.
    """
    sampling = divergence.request.sampling
    known = dict(scores[2])
    if not {divergence.right, divergence.wrong} <= known.keys():
        return None
    heat = sampling["temperature"] or 1.0

    def weight(token: int) -> float:
        count = divergence.before.count(token)
        penalty = sampling.get("frequency_penalty", 0.0) * count
        penalty += sampling.get("presence_penalty", 0.0) * bool(count)
        return float((known[token] - penalty) / heat + noise.get(token, 0.0))

    return abs(weight(divergence.right) - weight(divergence.wrong))


def _scores(entry: pb.TokenLogprob) -> Scores:
    return entry.chosen, entry.rank, tuple((each.token, each.logprob) for each in entry.top)
