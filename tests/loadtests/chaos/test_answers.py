"""Comparison of an answer under faults with the answer of an undisturbed run."""

import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.common.grammar.grammar_text import check_structured_outputs
from penstock.common.structured_outputs import StructuredOutputs
from penstock.loadtests.chaos.answers import Divergence, Stream, compare, near_tie
from penstock.loadtests.chaos.request_mix import (
    KINDS,
    PATTERN,
    SCHEMA,
    TOOL_CHOICES,
    ChaosRequest,
    make_requests,
)
from penstock.protos import inference_pb2 as pb

REQUEST = ChaosRequest(1, "greedy with logprobs", "Hello", {"temperature": 0.0})


def reply(position: int, *tokens: int, choice: int = 0, finish: str = "") -> pb.GenerateReply:
    scores = [pb.TokenLogprob(chosen=-token / 10, rank=1) for token in tokens]
    text = "".join(f"<{token}>" for token in tokens)
    return pb.GenerateReply(
        choice=choice, position=position, tokens=tokens, text=text,
        logprobs=scores, finish_reason=finish,
    )  # fmt: skip


def stream_of(*replies: pb.GenerateReply) -> Stream:
    stream = Stream("name", REQUEST, 0.0)
    for number, each in enumerate(replies):
        stream.take(each, float(number))
    return stream


EXPECTED = stream_of(reply(0, 5), reply(1, 6, 7), reply(3, 8, finish="length"))


def test_division_of_tokens_into_replies_does_not_matter() -> None:
    stream = stream_of(reply(0, 5, 6), reply(2, 7), reply(3, 8, finish="length"))
    for exact in (True, False):
        assert compare(stream, EXPECTED, exact) == ([], [])
    assert stream.num_tokens == 4
    assert stream.arrivals == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        (
            [reply(0, 5), reply(0, 5)],
            "expected a reply that begins at position 1, received one that begins at 0",
        ),
        (
            [reply(0, 5), reply(2, 7)],
            "expected a reply that begins at position 1, received one that begins at 2",
        ),
        (
            [reply(0, 5, 6, 7, 8, finish="length"), reply(4, 9)],
            "a reply came after the finish reason",
        ),
        ([reply(0, 5, 6, 7, finish="length")], "3 tokens; reference: 4"),
        ([reply(0, 5, 6, 7, 8, finish="stop")], "finish is 'stop', but 'length' in the reference"),
        ([reply(0, 5, 6, 7, 8, finish="length"), reply(0, 5, choice=1)], "choices [0, 1], not [0]"),
    ],
)
def test_repeated_or_missing_positions_and_wrong_endings_are_found(
    replies: list[pb.GenerateReply], message: str
) -> None:
    problems, _ = compare(stream_of(*replies), EXPECTED, exact=True)
    assert any(message in problem for problem in problems), problems


def test_different_text_or_logprobs_are_found() -> None:
    whole = reply(0, 5, 6, 7, 8, finish="length")
    other = pb.GenerateReply()
    other.CopyFrom(whole)
    other.text = "<5><6><7>"
    assert "text is" in compare(stream_of(other), EXPECTED, exact=False)[0][0]
    other.CopyFrom(whole)
    other.logprobs[2].chosen += 1e-5
    assert compare(stream_of(other), EXPECTED, exact=False) == ([], [])
    assert "position 2 differ" in compare(stream_of(other), EXPECTED, exact=True)[0][0]
    other.logprobs[2].chosen += 1e-2
    assert "position 2 differ" in compare(stream_of(other), EXPECTED, exact=False)[0][0]


def test_different_token_is_a_problem_if_exact_else_a_divergence() -> None:
    stream = stream_of(reply(0, 5, 6, 9, 9, 9, finish="length"))
    assert compare(stream, EXPECTED, exact=True)[0]
    assert compare(stream, EXPECTED, exact=False) == ([], [Divergence(REQUEST, 0, (5, 6), 7, 9)])


def test_near_tie_is_the_score_difference_at_the_draw() -> None:
    divergence = Divergence(REQUEST, 0, (5, 9, 9), 7, 9)
    scores = (-0.5, 1, ((7, -0.5), (9, -0.25), (3, -4.0)))
    assert near_tie(divergence, scores, {}) == pytest.approx(0.25)
    penalised = {"temperature": 0.0, "presence_penalty": 0.05, "frequency_penalty": 0.1}
    other = replace(divergence, request=replace(REQUEST, sampling=penalised))
    assert near_tie(other, scores, {}) == pytest.approx(0.0)
    drawn = replace(divergence, request=replace(REQUEST, sampling={"temperature": 0.5}))
    assert near_tie(drawn, scores, {7: 0.5, 9: 0.0}) == pytest.approx(0.0)
    assert near_tie(replace(divergence, wrong=4), scores, {}) is None


def test_restarted_choice_must_repeat_its_known_tokens() -> None:
    stream = stream_of(reply(0, 5), reply(1, 6))
    stream.choices[0].restart()
    stream.take(reply(0, 5, 6, 7), 5.0)
    stream.take(reply(3, 8, finish="length"), 6.0)
    assert compare(stream, EXPECTED, exact=True) == ([], [])
    stream = stream_of(reply(0, 5), reply(1, 6))
    stream.choices[0].restart()
    stream.take(reply(0, 5, 9), 5.0)
    assert "the token at position 1 differs" in compare(stream, EXPECTED, exact=False)[0][0]


def test_requests_have_every_kind_and_depend_only_on_the_seed() -> None:
    requests = make_requests(20, 3, (10, 20))
    assert {request.kind for request in requests} == set(KINDS)
    for request in requests:
        most = 20 * (1 + request.is_constrained)
        assert 10 <= request.sampling["max_tokens"] <= most
    assert list(requests) == list(make_requests(20, 3, (10, 20)))
    assert list(requests) != list(make_requests(20, 4, (10, 20)))
    message = requests[1].message("c1", logprobs=7)
    assert (message.request_id, message.sampling.logprobs) == ("c1", 7)


# ------------------------------------------------------------------ constrained answers

STATION = {"station": "By the river", "minutes": 7}
VALID = json.dumps({"kind": "letter", "stations": [STATION] * 4})


def chunk(
    call: dict[str, Any] | None = None, finish: str | None = None, **more: Any
) -> dict[str, Any]:
    delta = {} if call is None else {"tool_calls": [call]}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}


def calling(*chunks: dict[str, Any]) -> Stream:
    stream = Stream("name", ChaosRequest(1, "named tool", "Hello", {"temperature": 0.9}), 0.0)
    for number, each in enumerate(chunks):
        stream.take_chunk(each, float(number))
    return stream


def called(text: str, call_id: str = "a") -> list[dict[str, Any]]:
    """Return the chunks of an answer that calls `send` with the arguments `text`."""
    begin = {"index": 0, "id": call_id, "function": {"name": "send", "arguments": text[:9]}}
    rest = {"index": 0, "function": {"arguments": text[9:]}}
    return [
        chunk(begin, token_ids=[5]),
        chunk(rest, token_ids=[6, 7]),
        chunk(finish="tool_calls"),
    ]


def test_calls_are_compared_without_their_ids() -> None:
    stream = calling(*called(VALID, "b"))
    assert compare(stream, calling(*called(VALID)), exact=True) == ([], [])
    assert stream.num_tokens == 3
    assert stream.arrivals == [0.0, 1.0]
    other = VALID.replace("river", "water")
    problems, _ = compare(calling(*called(other)), stream, exact=True)
    assert problems == ["choice 0: the tool calls differ from those of the reference"]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (called(VALID[:-1]), "is not valid"),
        (called(VALID.replace("letter", "stone")), "is not valid: 'stone' is not one of"),
        (called(VALID)[2:], "0 tool calls and the text ''"),
        (
            [*called(VALID)[:1], *called(VALID)],
            "the pieces of tool call 0 have no id, or more than one",
        ),
        ([*called(VALID), chunk(finish="stop")], "a chunk came after the finish reason"),
    ],
)
def test_calls_of_another_form_are_found(chunks: list[dict[str, Any]], message: str) -> None:
    stream = calling(*chunks)
    problems, divergences = compare(stream, calling(*called(VALID)), exact=False)
    assert any(message in problem for problem in problems), problems
    assert divergences == []


@pytest.mark.parametrize("kind", ["schema", "several choices of a pattern"])
def test_complete_text_of_another_form_is_found(kind: str) -> None:
    request = ChaosRequest(1, kind, "Hello", KINDS[kind])
    whole, cut = (Stream("name", request, 0.0) for _ in range(2))
    whole.take(pb.GenerateReply(position=0, tokens=[5], text="x", finish_reason="stop"), 0.0)
    cut.take(pb.GenerateReply(position=0, tokens=[5], text="x", finish_reason="length"), 0.0)
    assert len(compare(whole, whole, exact=True)[0]) == 1
    assert compare(cut, cut, exact=True) == ([], [])


def test_forms_are_supported_and_end_tokens_end_constrained_answers() -> None:
    check_structured_outputs(StructuredOutputs("json", json.dumps(SCHEMA)))
    check_structured_outputs(StructuredOutputs("regex", PATTERN))
    for request in make_requests(len(KINDS), 0, (10, 20)):
        assert request.is_constrained != ("ignore_eos" in request.sampling)
        assert (request.kind in TOOL_CHOICES) <= request.is_constrained
