"""`token_chunks`, the fast path for single tokens, gives the same chunks as the general path.

Echoed prompts are sent in fragments.
"""

import json

import pytest

from penstock.common.text.token_bytes import TokenBytes
from penstock.router.api.openai.response import ChatFormatter, CompletionFormatter
from penstock.router.api.openai.response_context import ResponseContext
from penstock.router.requests.json_text import CHARS_PER_FRAGMENT
from penstock.router.requests.response_stream import Delta
from tests.support.tokenizers import byte_level

TOKEN_BYTES = TokenBytes(byte_level())
PROMPTS = [[1, 2], [3]]
TEXTS = [" a", "", '"quoted" \\ and\nlines\0', "日本 😀", "\u2028</script>"]


def context(**changes: object) -> ResponseContext:
    fields: dict[str, object] = {
        "id": "cmpl-1",
        "created": 7,
        "model": 'my "model"',
        "prompts": PROMPTS,
        "token_bytes": TOKEN_BYTES,
        "num_choices": 2,
    }
    return ResponseContext(**(fields | changes))  # type: ignore[arg-type]


def plain(position: int, text: str, index: int = 1, choice: int = 1) -> Delta:
    return Delta(index, choice, position, (5,), text, (None,))


text_of = "".join


@pytest.mark.parametrize("kind", [CompletionFormatter, ChatFormatter])
@pytest.mark.parametrize("wants_usage", [False, True])
def test_token_chunk_equals_the_general_chunk(
    kind: type[CompletionFormatter | ChatFormatter], wants_usage: bool
) -> None:
    fast, general = kind(context(wants_usage=wants_usage)), kind(context(wants_usage=wants_usage))
    # The first chunk of a choice is made by the general path, because it may have more fields.
    assert fast.token_chunks.get(1, 1, "x") is None
    assert text_of(fast.chunk(plain(0, "first"))) == text_of(general.chunk(plain(0, "first")))
    for position, text in enumerate(TEXTS, start=1):
        expected = text_of(general.chunk(plain(position, text))).encode()
        assert fast.token_chunks.get(1, 1, text) == expected
    assert fast.token_chunks.get(1, 0, "x") is None
    # Both formatters count the same tokens, so their usage is equal.
    assert fast.end_of_stream() == general.end_of_stream()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_logprobs": 0},
        {"return_token_ids": True},
        {"wants_continuous_usage": True},
        {"only_echo": True, "echo": [["a"]]},
    ],
)
@pytest.mark.parametrize("kind", [CompletionFormatter, ChatFormatter])
def test_call_that_wants_more_than_text_has_no_token_chunks(
    kind: type[CompletionFormatter | ChatFormatter], changes: dict[str, object]
) -> None:
    formatter = kind(context(**{"prompts": PROMPTS[:1], "num_choices": 1, **changes}))
    text_of(formatter.chunk(plain(0, "first", 0, 0)))
    assert formatter.token_chunks.get(0, 0, "x") is None


@pytest.mark.parametrize("kind", [CompletionFormatter, ChatFormatter])
def test_fragments_of_an_echoed_prompt_are_sent_in_order(
    kind: type[CompletionFormatter | ChatFormatter],
) -> None:
    """The fragments stay separate, because joining 16 MiB of text takes 13 ms."""
    long = ["x" * CHARS_PER_FRAGMENT, "", "\u00e9" * CHARS_PER_FRAGMENT]
    for echo in (["a", "b"], long):
        call = context(prompts=PROMPTS[:1], num_choices=1, echo=[echo])
        whole = json.loads(text_of(kind(call).full_response([plain(0, "first", 0, 0)])))
        (choice,) = whole["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text == "".join(echo) + "first"
        fragments = list(kind(call).chunk(plain(0, "first", 0, 0)))
        assert max(map(len, fragments)) <= 2 * CHARS_PER_FRAGMENT
