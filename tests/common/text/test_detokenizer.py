from hypothesis import given
from hypothesis import strategies as st

from penstock.common.text.detokenizer import IncrementalDetokenizer, StopOptions
from penstock.common.text.token_bytes import TokenBytes
from tests.support.tokenizers import KINDS, id_of

TOKENIZERS = {name: make() for name, make in KINDS.items()}
PIECES = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}
RULES = st.builds(
    StopOptions,
    stop=st.lists(
        st.sampled_from(["the", " do", "e", "日", "\ufffd", "ab", "<tool>", "the quick"]),
        max_size=3,
    ).map(tuple),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    min_tokens=st.integers(0, 6),
)
NAMES = st.sampled_from(sorted(KINDS))


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Tokens of an answer: of a text, or any at all."""
    name = draw(NAMES)
    size = TOKENIZERS[name].get_vocab_size()
    some = st.lists(st.integers(0, size - 1), max_size=20)
    sense = st.sampled_from(["the dog does the end 日本 😀", "a b  c the quick", "ab ab"]).map(
        lambda text: TOKENIZERS[name].encode(text).ids
    )
    return name, draw(some | sense)


def play(
    name: str, rules: StopOptions, tokens: list[int], sizes: list[int], stopped: bool
) -> tuple[str, int, str | None]:
    """The answer in deliveries of these sizes: its text, its length in tokens, its stop string."""
    answer = IncrementalDetokenizer(PIECES[name], rules)
    text, taken, left = "", 0, tokens
    for size in [*sizes, len(tokens)]:
        size = max(1, size)
        part, left = left[:size], left[size:]
        delta = answer.feed(part, ended=not left, stopped=stopped and not left)
        text += delta.text
        taken += delta.num_tokens
        if delta.stop is not None or not left:
            return text, taken, delta.stop
    raise AssertionError("the answer never ended")


@given(answers(), RULES, st.lists(st.integers(1, 6), max_size=20), st.booleans())
def test_an_answer_is_a_function_of_its_log(
    case: tuple[str, list[int]], rules: StopOptions, sizes: list[int], stopped: bool
) -> None:
    name, tokens = case
    one_by_one = play(name, rules, tokens, [1] * len(tokens), stopped)
    assert play(name, rules, tokens, sizes, stopped) == one_by_one
    assert play(name, rules, tokens, [], stopped) == one_by_one


@given(answers(), st.lists(st.integers(1, 6), max_size=20))
def test_without_stops_it_is_all_the_bytes(case: tuple[str, list[int]], sizes: list[int]) -> None:
    name, tokens = case
    text, taken, stop = play(name, StopOptions(), tokens, sizes, stopped=False)
    shown = [token for token in tokens if token not in PIECES[name].special]
    whole = b"".join(map(PIECES[name].bytes_of, shown)).decode(errors="replace")
    assert (text, taken, stop) == (whole, len(tokens), None)


@given(st.text(max_size=30), st.text(max_size=30))
def test_prompt_and_answer_make_one_text(prompt: str, more: str) -> None:
    # A byte-level prompt cut between characters goes on in its answer without a seam.
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


def test_a_character_that_never_finishes_is_marked_at_the_end() -> None:
    answer = IncrementalDetokenizer(PIECES["byte-level"], StopOptions())
    assert answer.feed(encode("🙂")[:1], ended=True).text == "\ufffd"


def test_a_stop_string_over_several_tokens_cuts_text_and_tokens() -> None:
    tokens = encode("see the lazy dog") + encode(" and more")
    stop = "y d"
    answer = IncrementalDetokenizer(PIECES["byte-level"], StopOptions(stop=(stop,)))
    delta = answer.feed(tokens)
    assert (delta.text, delta.stop) == ("see the laz", stop)
    # The last token kept is the one that completes the stop string.
    pieces = PIECES["byte-level"]
    assert stop in pieces.decode(tokens[: delta.num_tokens], skip_special_tokens=True)
    assert stop not in pieces.decode(tokens[: delta.num_tokens - 1], skip_special_tokens=True)


def test_a_stop_string_is_kept_if_asked_for() -> None:
    rules = StopOptions(stop=("laz",), include_stop_str_in_output=True)
    answer = IncrementalDetokenizer(PIECES["byte-level"], rules)
    assert answer.feed(encode("see the lazy dog")).text == "see the laz"


def test_a_stop_token_is_not_part_of_the_text() -> None:
    tokens = [*encode("the dog"), id_of(TOKENIZERS["byte-level"], "<tool>")]
    pieces = PIECES["byte-level"]
    plain = IncrementalDetokenizer(pieces, StopOptions()).feed(tokens, ended=True, stopped=True)
    kept = IncrementalDetokenizer(pieces, StopOptions(include_stop_str_in_output=True)).feed(
        tokens, ended=True, stopped=True
    )
    assert (plain.text, plain.num_tokens) == ("the dog", len(tokens))
    assert kept.text == "the dog<tool>"


def test_stop_strings_wait_for_min_tokens() -> None:
    tokens = encode("a b a b a b")
    answer = IncrementalDetokenizer(PIECES["byte-level"], StopOptions(stop=("b",), min_tokens=4))
    delta = answer.feed(tokens)
    assert delta.num_tokens >= 4
    assert delta.text.count("b") >= 1
