import json
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from penstock.common.text import token_bytes
from penstock.common.text.token_bytes import TokenBytes, UnsupportedTokenizer, read_decoder
from tests.support.tokenizers import KINDS, id_of

TOKENIZERS = {name: make() for name, make in KINDS.items()}
PIECES = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@st.composite
def some_tokens(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Generate a tokenizer kind and arbitrary token ids, which may form invalid UTF-8."""
    name = draw(st.sampled_from(sorted(KINDS)))
    size = TOKENIZERS[name].get_vocab_size()
    return name, draw(st.lists(st.integers(0, size - 1), max_size=24))


@given(some_tokens(), st.booleans())
def test_decoded_text_equals_that_of_the_tokenizer(
    case: tuple[str, list[int]], keep_special: bool
) -> None:
    name, tokens = case
    expected = TOKENIZERS[name].decode(tokens, skip_special_tokens=not keep_special)
    text = PIECES[name].decode(tokens, not keep_special)
    if name == "byte-fallback" and "\ufffd" in expected:
        # If byte tokens form invalid UTF-8, the library replaces all their bytes, even valid ones.
        assert 0 < text.count("\ufffd") <= expected.count("\ufffd")
        return
    assert text == expected


@given(some_tokens(), st.booleans(), st.integers(1, 3))
def test_text_does_not_depend_on_the_size_of_its_parts(
    case: tuple[str, list[int]], skip_special: bool, num_tokens: int
) -> None:
    name, tokens = case
    whole = PIECES[name].decode(tokens, skip_special)
    with mock.patch.object(token_bytes, "TOKENS_PER_TEXT", num_tokens):
        assert PIECES[name].decode(tokens, skip_special) == whole


@pytest.mark.parametrize("num_tokens", [1, 2, 100])
@pytest.mark.parametrize("num_spaces", [0, 2, 3, 5])
def test_leading_spaces_of_several_parts_are_stripped(num_tokens: int, num_spaces: int) -> None:
    tokenizer = KINDS["byte-fallback"]()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    )
    tokens = [id_of(tokenizer, name) for name in ["▁"] * num_spaces + ["a", "▁", "▁a"]]
    with mock.patch.object(token_bytes, "TOKENS_PER_TEXT", num_tokens):
        text = TokenBytes(tokenizer).decode(tokens)
    assert text == tokenizer.decode(tokens) == " " * max(num_spaces - 3, 0) + "a  a"


@given(st.sampled_from(["byte-level", "byte-fallback"]), st.text(max_size=40))
def test_encode_then_decode_returns_the_text(name: str, text: str) -> None:
    tokens = TOKENIZERS[name].encode(text).ids
    if name == "byte-fallback":
        text = text.removeprefix("▁").replace("▁", " ")
        if text.startswith(" "):
            return  # if a text begins with a space, Metaspace adds no other space
    assert PIECES[name].decode(tokens, skip_special_tokens=True) == text


def test_incomplete_utf8_sequence_becomes_one_replacement_character() -> None:
    pieces = PIECES["byte-fallback"]
    byte = {name: id_of(TOKENIZERS["byte-fallback"], f"<0x{name}>") for name in ("E6", "97")}
    a = id_of(TOKENIZERS["byte-fallback"], "a")
    assert pieces.decode([a, byte["E6"], byte["97"], a], skip_special_tokens=True) == "a\ufffda"


def test_unknown_ids_decode_to_nothing() -> None:
    pieces = PIECES["byte-level"]
    assert pieces.bytes_of(100_000) == b""
    assert pieces.decode([100_000], skip_special_tokens=False) == ""


def test_added_token_is_decoded_verbatim() -> None:
    token = id_of(TOKENIZERS["byte-level"], "→plain→")
    assert PIECES["byte-level"].text_of(token) == "→plain→"


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Strip(" ", 0, 1), "Strip"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.CTC()]), "CTC"),
        (None, "no decoder"),
    ],
)
def test_unsupported_decoder_is_refused_by_name(
    decoder: decoders.Decoder | None, words: str
) -> None:
    tokenizer = Tokenizer(models.BPE())
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(UnsupportedTokenizer, match=words):
        TokenBytes(tokenizer)


def test_metaspace_that_prepends_nothing_keeps_the_first_space() -> None:
    spec = json.loads(decoders.Metaspace(prepend_scheme="never").__getstate__())
    assert read_decoder(spec).first_token_marker == b""
