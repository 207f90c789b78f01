from hypothesis import given
from hypothesis import strategies as st

from penstock.common.text.detokenizer import IncrementalDetokenizer, StopOptions
from penstock.common.text.token_bytes import TokenBytes
from tests.support.tokenizers import KINDS, id_of

TOKENIZERS = {name: make() for name, make in KINDS.items()}
PIECES = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}
OPTIONS = st.builds(
    StopOptions,
    stop=st.lists(
        st.sampled_from(["the", " do", "e", "日", "\ufffd", "ab", "<tool>", "the quick"]),
        max_size=3,
    ).map(tuple),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    min_tokens=st.integers(0, 6),
)
KIND_NAMES = st.sampled_from(sorted(KINDS))


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Generate a tokenizer kind and an answer: the tokens of a text, or arbitrary ids."""
    name = draw(KIND_NAMES)
    size = TOKENIZERS[name].get_vocab_size()
    arbitrary = st.lists(st.integers(0, size - 1), max_size=20)
    encoded = st.sampled_from(["the dog does the end 日本 😀", "a b  c the quick", "ab ab"]).map(
        lambda text: TOKENIZERS[name].encode(text).ids
    )
    return name, draw(arbitrary | encoded)


def feed_in_deliveries(
    name: str, options: StopOptions, tokens: list[int], sizes: list[int], stopped: bool
) -> tuple[str, int, str | None]:
    """Feed an answer in deliveries of `sizes` tokens; return text, token count and stop string."""
    answer = IncrementalDetokenizer(PIECES[name], options)
    text, num_tokens, remaining = "", 0, tokens
    for size in [*sizes, len(tokens)]:
        size = max(1, size)
        delivered, remaining = remaining[:size], remaining[size:]
        delta = answer.feed(delivered, ended=not remaining, stopped=stopped and not remaining)
        text += delta.text
        num_tokens += delta.num_tokens
        if delta.stop is not None or not remaining:
            return text, num_tokens, delta.stop
    raise AssertionError("the answer never ended")


@given(answers(), st.booleans())
def test_feed_token_returns_the_text_that_feed_returns(
    case: tuple[str, list[int]], skip_special_tokens: bool
) -> None:
    name, tokens = case
    options = StopOptions(skip_special_tokens=skip_special_tokens)
    fast, general = (IncrementalDetokenizer(PIECES[name], options) for _ in range(2))
    for number, token in enumerate(tokens):
        # A resumed answer starts with `feed`, so `feed` and `feed_token` may be mixed.
        text = fast.feed((token,)).text if number % 3 == 2 else fast.feed_token(token)
        assert text == general.feed((token,)).text
    assert fast.feed((), ended=True).text == general.feed((), ended=True).text


@given(answers(), OPTIONS, st.lists(st.integers(1, 6), max_size=20), st.booleans())
def test_text_does_not_depend_on_how_tokens_are_split_into_deliveries(
    case: tuple[str, list[int]], options: StopOptions, sizes: list[int], stopped: bool
) -> None:
    name, tokens = case
    one_by_one = feed_in_deliveries(name, options, tokens, [1] * len(tokens), stopped)
    assert feed_in_deliveries(name, options, tokens, sizes, stopped) == one_by_one
    assert feed_in_deliveries(name, options, tokens, [], stopped) == one_by_one


@given(answers(), st.lists(st.integers(1, 6), max_size=20))
def test_text_without_stop_strings_is_all_decoded_bytes(
    case: tuple[str, list[int]], sizes: list[int]
) -> None:
    name, tokens = case
    text, num_tokens, stop = feed_in_deliveries(name, StopOptions(), tokens, sizes, stopped=False)
    shown = [token for token in tokens if token not in PIECES[name].special]
    whole = b"".join(map(PIECES[name].bytes_of, shown)).decode(errors="replace")
    assert (text, num_tokens, stop) == (whole, len(tokens), None)


@given(st.text(max_size=30), st.text(max_size=30))
def test_prompt_text_and_answer_text_join_to_the_decoded_whole(prompt: str, more: str) -> None:
    # If a byte-level prompt ends at a character boundary, prompt and answer texts join exactly.
    tokenizer, pieces = TOKENIZERS["byte-level"], PIECES["byte-level"]
    first = tokenizer.encode(prompt).ids
    second = tokenizer.encode(more, add_special_tokens=False).ids
    answer = IncrementalDetokenizer(pieces, StopOptions()).feed(second, ended=True)
    assert pieces.decode(first + second, skip_special_tokens=True) == prompt + answer.text


def encode(text: str) -> list[int]:
    return TOKENIZERS["byte-level"].encode(text, add_special_tokens=False).ids


def test_an_unfinished_character_is_held_back() -> None:
    tokens = encode("🙂")
    assert len(tokens) > 1
    answer = IncrementalDetokenizer(PIECES["byte-level"], StopOptions())
    assert [answer.feed([token]).text for token in tokens] == [""] * (len(tokens) - 1) + ["🙂"]


def test_incomplete_character_at_the_end_becomes_a_replacement_character() -> None:
    answer = IncrementalDetokenizer(PIECES["byte-level"], StopOptions())
    assert answer.feed(encode("🙂")[:1], ended=True).text == "\ufffd"


def test_stop_string_completed_by_the_final_replacement_character_cuts_the_text() -> None:
    options = StopOptions(stop=("ab\ufffd",))
    answer = IncrementalDetokenizer(PIECES["byte-level"], options)
    first = answer.feed(encode("so ab"))
    last = answer.feed(encode("🙂")[:1], ended=True)
    assert (first.text + last.text, last.stop) == ("so ", "ab\ufffd")


def test_a_stop_string_over_several_tokens_cuts_text_and_tokens() -> None:
    tokens = encode("see the lazy dog") + encode(" and more")
    stop = "y d"
    answer = IncrementalDetokenizer(PIECES["byte-level"], StopOptions(stop=(stop,)))
    delta = answer.feed(tokens)
    assert (delta.text, delta.stop) == ("see the laz", stop)
    # `delta.num_tokens` counts the tokens up to the one that completes the stop string.
    pieces = PIECES["byte-level"]
    assert stop in pieces.decode(tokens[: delta.num_tokens], skip_special_tokens=True)
    assert stop not in pieces.decode(tokens[: delta.num_tokens - 1], skip_special_tokens=True)


def test_stop_string_is_included_on_request() -> None:
    options = StopOptions(stop=("laz",), include_stop_str_in_output=True)
    answer = IncrementalDetokenizer(PIECES["byte-level"], options)
    assert answer.feed(encode("see the lazy dog")).text == "see the laz"


def test_stop_token_is_not_part_of_the_text_unless_included() -> None:
    tokens = [*encode("the dog"), id_of(TOKENIZERS["byte-level"], "<tool>")]
    pieces = PIECES["byte-level"]
    plain = IncrementalDetokenizer(pieces, StopOptions()).feed(tokens, ended=True, stopped=True)
    kept = IncrementalDetokenizer(pieces, StopOptions(include_stop_str_in_output=True)).feed(
        tokens, ended=True, stopped=True
    )
    assert (plain.text, plain.num_tokens) == ("the dog", len(tokens))
    assert kept.text == "the dog<tool>"


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    tokens = encode("a b a b a b")
    answer = IncrementalDetokenizer(PIECES["byte-level"], StopOptions(stop=("b",), min_tokens=4))
    delta = answer.feed(tokens)
    assert delta.num_tokens >= 4
    assert delta.text.count("b") >= 1
