"""The formatter of responses gives the same events, however the answer is split."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.common.text.detokenizer import IncrementalDetokenizer, StopOptions
from penstock.common.text.token_bytes import TokenBytes
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.protos import worker_pb2 as pb
from penstock.router.api.generation.calls import SubmittedCall
from penstock.router.api.responses.formatter import FinishedResponse, ResponsesFormatter
from penstock.router.api.responses.response_object import ResponseObject
from penstock.router.config import RouterConfig
from penstock.router.errors import Code, ServingError
from penstock.router.parsers.answer_parser import ParsingOptions
from penstock.router.requests.answer_parsing import ModelParsers
from penstock.router.requests.json_text import CHARS_PER_FRAGMENT
from penstock.router.requests.response_stream import Delta, ResponseStream
from tests.support.responses_client import FULL, TEMPLATE, THOUGHT, TOKENIZER, tokens_of
from tests.support.tokenizers import write_folder

TEXT = FULL.replace("I add.", "Grüße 😀, I add.")
TOKENS = tokens_of(TEXT)
END_TOKEN = 2


class Setup:
    """Makes formatters for one model."""

    def __init__(self, folder: Path) -> None:
        written = write_folder(folder / "model", TOKENIZER, TEMPLATE)
        self.tokenizer = ModelTokenizer(written)
        self.parsers = ModelParsers(self.tokenizer, RouterConfig(written, "stub"))
        self.ended: list[FinishedResponse] = []
        self.is_kept = True

    def formatter(self, with_logprobs: bool = False, is_parsed: bool = True) -> ResponsesFormatter:
        options = ParsingOptions(reads_calls=True)
        prompt = [5] * 20
        parsing = self.parsers.parsing(prompt, "me", options) if is_parsed else None
        answers = ResponseStream(100, lambda requests: None)
        sampling = SamplingParams()
        call = SubmittedCall("resp_ab", "me", [prompt], sampling, answers, parsing)
        response = ResponseObject("resp_ab", 1, "stub", sampling, '"tools":[]')
        token_bytes = self.tokenizer.token_bytes
        return ResponsesFormatter(response, call, token_bytes, with_logprobs, self)

    def keeps(self, num_bytes: int) -> bool:
        return self.is_kept

    def record(self, finished: FinishedResponse) -> Iterator[str]:
        self.ended.append(finished)
        yield ""


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("formatter"))


def pieces_of(tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds when it arrives alone."""
    detokenizer = IncrementalDetokenizer(TokenBytes(TOKENIZER), StopOptions())
    return [detokenizer.feed_token(token) for token in tokens]


def entry(token: int) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(chosen=-token / 8, tokens=[token], values=[-token / 8])


def delta(texts: Sequence[str], begin: int, end: int, with_logprobs: bool = False) -> Delta:
    """Return the delta of tokens [begin, end); the end token follows the answer's last token."""
    tokens = list(TOKENS[begin:end])
    finish = ""
    if end == len(TOKENS):
        tokens.append(END_TOKEN)
        finish = "stop"
    logprobs = [entry(token) if with_logprobs else None for token in tokens]
    return Delta(0, 0, begin, tokens, "".join(texts[begin:end]), logprobs, finish)


def parsed(events: str) -> list[dict[str, Any]]:
    frames = events.removesuffix("\n\n").split("\n\n")
    return [json.loads(frame.split("\n")[1].removeprefix("data: ")) for frame in frames]


def joined(events: Sequence[dict[str, Any]]) -> list[Any]:
    """Return events without sequence numbers; neighboring deltas of an item are merged."""
    found: list[Any] = []
    for index, event in enumerate(events):
        assert event.pop("sequence_number") == index
        event.get("response", {}).pop("completed_at", None)
        last: Any = found[-1] if found else {"type": ""}
        if event["type"].endswith("delta") and last["type"] == event["type"]:
            last["delta"] += event["delta"]
            last.get("logprobs", []).extend(event.get("logprobs", []))
        else:
            found.append(event)
    return found


def streamed(setup: Setup, cuts: Sequence[int], with_logprobs: bool, idle: float) -> list[Any]:
    """Return the events of an answer that is split into deltas at `cuts`.

    If a delta has a single token, `token_chunk` formats it with probability `idle`.
    """
    formatter, texts = setup.formatter(with_logprobs), pieces_of(TOKENS)
    drawn = random.Random(len(cuts))
    events, begin = "", 0
    for end in (*cuts, len(TOKENS)):
        chunk = None
        if begin and end == begin + 1 < len(TOKENS) and drawn.random() < idle:
            chunk = formatter.token_chunk(0, 0, texts[begin])
        if chunk is None:
            events += "".join(formatter.chunk(delta(texts, begin, end, with_logprobs)))
        else:
            events += chunk.decode()
        begin = end
    assert formatter.end_of_stream() == ""
    return joined(parsed(events))


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_events_do_not_depend_on_how_the_answer_is_split(setup: Setup, with_logprobs: bool) -> None:
    drawn = random.Random(7)
    whole = json.loads(
        "".join(
            setup.formatter(with_logprobs).full_response(
                [delta(pieces_of(TOKENS), 0, len(TOKENS), with_logprobs)]
            )
        )
    )
    whole.pop("completed_at")
    every = range(1, len(TOKENS))
    expected = streamed(setup, every, with_logprobs, 0.0)
    assert expected[-1]["response"] == whole
    reasoning = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert reasoning == len(tokens_of(THOUGHT))
    assert [item["type"] for item in whole["output"]] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    for count in (0, 1, 3, 20, 60, len(every)):
        for idle in (0.0, 0.5, 1.0):
            cuts = sorted(drawn.sample(every, min(count, len(every))))
            assert streamed(setup, cuts, with_logprobs, idle) == expected, (cuts, idle)


def test_logprobs_are_those_of_the_contents_tokens(setup: Setup) -> None:
    texts = pieces_of(TOKENS)
    whole = delta(texts, 0, len(TOKENS), True)
    response = json.loads("".join(setup.formatter(True).full_response([whole])))
    (content,) = response["output"][1]["content"]
    first = len(tokens_of(THOUGHT))
    count = len(content["logprobs"])
    expected = [-token / 8 for token in TOKENS[first : first + count]]
    assert [one["logprob"] for one in content["logprobs"]] == expected
    assert b"".join(bytes(one["bytes"]) for one in content["logprobs"]).decode() == content["text"]


def test_logprobs_of_one_token_are_encoded_in_a_step(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []

    def encode(token_bytes: TokenBytes, token: int, entry: object) -> str:
        encoded.append(token)
        return "{}"

    monkeypatch.setattr("penstock.router.api.responses.formatter.logprobs_json", encode)
    tokens = [END_TOKEN] * 50 + [TOKENS[-1]]  # end tokens add no text
    whole = Delta(0, 0, 0, tokens, pieces_of(tokens[-1:])[0], [entry(9)] * 51, "length")
    counts = [0]
    for _ in setup.formatter(True, is_parsed=False).chunk(whole):
        counts.append(len(encoded))
    assert encoded == tokens
    assert max(after - before for before, after in itertools.pairwise(counts)) == 1


def test_answer_without_a_parser_is_one_message(setup: Setup) -> None:
    formatter = setup.formatter(is_parsed=False)
    whole = delta(pieces_of(TOKENS), 0, len(TOKENS))
    response = json.loads("".join(formatter.full_response([whole])))
    assert response["output"][0]["content"][0]["text"] == TEXT


def test_finished_response_is_reported_with_what_was_sent(setup: Setup) -> None:
    setup.ended.clear()
    text = "".join(setup.formatter().full_response([delta(pieces_of(TOKENS), 0, len(TOKENS))]))
    (finished,) = setup.ended
    assert "".join(finished.body) == text
    assert finished.status == "completed"


def test_error_after_the_end_adds_no_events(setup: Setup) -> None:
    formatter = setup.formatter()
    "".join(formatter.chunk(delta(pieces_of(TOKENS), 0, len(TOKENS))))
    assert [*formatter.error_events(ServingError(Code.INTERNAL, "x"))] == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (Code.OVERLOADED, "rate_limit_exceeded"),
        (Code.INVALID, "invalid_prompt"),
        (Code.INTERNAL, "server_error"),
        (Code.DEADLINE, "server_error"),
    ],
)
def test_codes_of_failed_responses_are_openais(setup: Setup, code: Code, expected: str) -> None:
    formatter = setup.formatter()
    "".join(formatter.chunk(delta(pieces_of(TOKENS), 0, 4)))
    setup.ended.clear()
    error, failed = parsed("".join(formatter.error_events(ServingError(code, "why", "x"))))
    assert (error["type"], error["code"], error["message"], error["param"]) == (
        *("error", code.value),
        *("why", "x"),
    )
    assert failed["response"]["error"] == {"code": expected, "message": "why"}
    assert setup.ended[0].status == "failed"


def test_events_of_a_failed_stream_come_in_short_fragments(setup: Setup) -> None:
    formatter = setup.formatter(is_parsed=False)
    text = "x" * (8 * CHARS_PER_FRAGMENT)
    "".join(formatter.chunk(Delta(0, 0, 0, [9], text, [None])))
    fragments = [*formatter.error_events(ServingError(Code.INTERNAL, "why"))]
    assert max(map(len, fragments)) <= CHARS_PER_FRAGMENT
    assert parsed("".join(fragments))[1]["response"]["output"][0]["content"][0]["text"] == text


def test_response_shows_whether_it_is_stored(setup: Setup) -> None:
    for is_kept in (True, False):
        setup.is_kept = is_kept
        whole = setup.formatter().full_response([delta(pieces_of(TOKENS), 0, len(TOKENS))])
        assert json.loads("".join(whole))["store"] is is_kept
    setup.is_kept = True


def test_plain_stream_has_the_text_of_the_whole_answer(setup: Setup) -> None:
    texts = pieces_of(TOKENS)
    formatter = setup.formatter(is_parsed=False)
    events = "".join(formatter.chunk(delta(texts, 0, 1)))
    for text in texts[1:-1]:
        events += (formatter.token_chunk(0, 0, text) or b"").decode()
    events += "".join(formatter.chunk(delta(texts, len(TOKENS) - 1, len(TOKENS))))
    found = joined(parsed(events))
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    whole = setup.formatter(is_parsed=False).full_response([delta(texts, 0, len(TOKENS))])
    expected = json.loads("".join(whole))
    expected.pop("completed_at")
    assert deltas == [TEXT]
    assert found[-1]["response"] == expected
