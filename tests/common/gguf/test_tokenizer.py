"""Tokenizers of GGUF files: the same ids and texts as the tokenizer that a file was made from."""

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers.convert_slow_tokenizer import TikTokenConverter

from penstock.common.checkpoint_errors import BadCheckpoint, UnsupportedModel
from penstock.common.gguf.documents import tokenizer_of
from penstock.common.gguf.pre_tokenizers import PRE_TOKENIZERS
from penstock.common.text.tokenizer import ModelTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = ("<unk>", "<s>", "</s>", "<|eot_id|>")
WORDS = [
    "the quick brown fox doesn't jump over the lazy dog's 12345 legs\n\n  at all",
    "grüße aus KÖLN, naïve café, 12 + 34 = 46, THE end/of/the story is the end",
    "日本語の文章です。日本 emoji 😀😀 family and   spaces\n\tlines\r\n \n e\u0301",
] * 3
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([*" ".join(WORDS).split(" "), "  ", "\n", *SPECIAL]), max_size=8).map(
        " ".join
    ),
)

Write = Callable[[gguf.GGUFWriter], None]


def write(path: Path, add: Write, **changes: Any) -> Path:
    """Write a file with a tokenizer and one tensor; `changes` replace entries by key."""
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    for key, value in changes.items():
        name = "tokenizer.ggml." + key
        writer.kv_data[0].pop(name, None)
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def train_byte_level(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def byte_level_entries(tokenizer: Tokenizer, pre: str) -> Write:
    content = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda text: vocab[text])
    kinds = [
        CONTROL if text in SPECIAL else USER_DEFINED if text == "<tool>" else NORMAL
        for text in tokens
    ]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
        writer.add_bos_token_id(vocab["<s>"])
        writer.add_eos_token_id(vocab["</s>"])

    return add


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

SOURCES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gpt-2": lambda: (transformers.GPT2Tokenizer().backend_tokenizer.pre_tokenizer, None),
    "qwen2": lambda: (
        transformers.Qwen2Tokenizer().backend_tokenizer.pre_tokenizer,
        normalizers.NFC(),
    ),
    "llama-bpe": lambda: (split(TikTokenConverter().pattern), None),
    "dbrx": lambda: (split(TikTokenConverter().pattern), None),
    "gpt-4o": lambda: (split(CASED % (ENDINGS, ENDINGS) + r"\p{N}{1,3}" + REST), None),
    "tekken": lambda: (split(CASED % ("", "") + r"\p{N}" + REST), None),
    "smollm": lambda: (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        None,
    ),
}
"""Pre-tokenizer and normalizer of models of each kind, as transformers or the models have them."""


@pytest.fixture(scope="module", params=SOURCES)
def byte_level_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, ModelTokenizer]:
    source = train_byte_level(*SOURCES[request.param]())
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return source, ModelTokenizer(write(path, byte_level_entries(source, request.param)))


@given(text=TEXTS)
def test_byte_level_ids_are_those_of_the_source(
    text: str, byte_level_pair: tuple[Tokenizer, ModelTokenizer]
) -> None:
    source, found = byte_level_pair
    expected = source.encode(text, add_special_tokens=False).ids
    assert found.encode(text, add_special_tokens=False) == expected
    assert found.token_bytes.decode(expected) == source.decode(expected)


def test_other_names_are_aliases_of_tested_kinds() -> None:
    tested = {id(PRE_TOKENIZERS[name]) for name in SOURCES}
    assert {id(kind) for kind in PRE_TOKENIZERS.values()} == tested


def test_user_defined_tokens_are_shown_and_control_tokens_are_not(tmp_path: Path) -> None:
    source = train_byte_level(*SOURCES["qwen2"]())
    found = ModelTokenizer(write(tmp_path / "m.gguf", byte_level_entries(source, "qwen2")))
    tokens = found.encode("a<tool></s>b")
    assert found.token_bytes.decode(tokens) == "a<tool>b"
    assert source.token_to_id("</s>") not in found.encode_without_control("a</s>b")


@cache
def pieces() -> tuple[list[str], list[float], list[int]]:
    """Return tokens, scores and kinds of a SentencePiece model, trained as BPE on `WORDS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    vocab = tokenizer.get_vocab()
    learnt = sorted(vocab, key=lambda text: (len(text) == 1, vocab[text]))
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt]
    kinds = [UNKNOWN, *[CONTROL] * 3, *[BYTE] * 256, *[NORMAL] * len(learnt)]
    scores = [0.0] * 260 + [-float(rank) for rank in range(len(learnt))]
    return tokens, scores, kinds


def piece_entries(writer: gguf.GGUFWriter) -> None:
    tokens, scores, kinds = pieces()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def sentence_piece(text: str) -> list[int]:
    """Encode as SentencePiece's BPE does: repeatedly join the adjacent pair with the best score."""
    tokens, scores, kinds = pieces()
    ids = {token: index for index, token in enumerate(tokens) if kinds[index] == NORMAL}
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [(left + right, at) for at, (left, right) in enumerate(pairwise(parts))]
        joined = [(-scores[ids[pair]], at) for pair, at in pairs if pair in ids]
        if not joined:
            break
        at = min(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [4 + byte for byte in part.encode()]
    return found


@pytest.fixture(scope="module")
def piece_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer(write(tmp_path_factory.mktemp("gguf") / "m.gguf", piece_entries))


@given(text=TEXTS.filter(lambda text: text and not any(name in text for name in SPECIAL)))
def test_sentence_piece_ids_are_those_of_its_algorithm(
    text: str, piece_tokenizer: ModelTokenizer
) -> None:
    found = piece_tokenizer.encode(text)
    # By default, the tokenizer of a GGUF file adds BOS (1).
    assert found == [1, *sentence_piece(text)]
    assert piece_tokenizer.token_bytes.decode(found) == text


def test_sentence_piece_ids_are_those_of_transformers(piece_tokenizer: ModelTokenizer) -> None:
    tokens, scores, _ = pieces()
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = transformers.tokenization_utils_base.generate_merges(
        vocab, dict(zip(tokens, scores, strict=True)), SPECIAL
    )
    source = transformers.LlamaTokenizer(vocab=vocab, merges=merges)
    for text in WORDS:
        found = piece_tokenizer.encode(text, add_special_tokens=False)
        assert found == source(text, add_special_tokens=False).input_ids


def test_text_of_a_control_token_is_never_joined_from_pieces(
    piece_tokenizer: ModelTokenizer,
) -> None:
    assert 2 in piece_tokenizer.encode("x</s>")
    plain = piece_tokenizer.encode_without_control("x</s>")
    assert not {0, 2, 3} & set(plain)
    assert piece_tokenizer.token_bytes.decode(plain) == "x</s>"


def test_space_is_not_prepended_if_the_file_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", piece_entries, add_space_prefix=False, add_bos_token=False)
    found = ModelTokenizer(path)
    assert found.encode("the") == found.encode("the", add_special_tokens=False)
    assert found.token_bytes.decode(found.encode(" the ")) == " the "


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", piece_entries, add_eos_token=True)
    found = ModelTokenizer(path)
    assert found.encode("x") == [1, *sentence_piece("x"), 2]
    assert found.encode("x", add_special_tokens=False) == sentence_piece("x")


def test_source_post_processor_and_ours_agree(tmp_path: Path) -> None:
    source = train_byte_level(*SOURCES["llama-bpe"]())
    bos = source.token_to_id("<s>")
    assert bos is not None
    source.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    path = write(tmp_path / "m.gguf", byte_level_entries(source, "llama-bpe"))
    assert ModelTokenizer(path).encode(WORDS[0]) == source.encode(WORDS[0]).ids


def qwen2_entries() -> Write:
    return byte_level_entries(train_byte_level(*SOURCES["qwen2"]()), "qwen2")


BAD: dict[str, tuple[bool, dict[str, Any], str]] = {
    "model": (
        True,
        {"model": "t5"},
        "tokenizer.ggml.model 't5' is not supported: expected 'gpt2' or",
    ),
    "pre": (
        True,
        {"pre": "viking"},
        "tokenizer.ggml.pre 'viking' is not supported: expected one of gpt-2, ",
    ),
    "no pre": (True, {"pre": None}, "has no tokenizer.ggml.pre: expected a string"),
    "merge": (
        True,
        {"merges": ["a b", "abc"]},
        "tokenizer.ggml.merges[1] is 'abc': expected two tokens",
    ),
    "kinds": (
        True,
        {"token_type": [1, 1]},
        "token_type is an array of 2 items: expected",
    ),
    "kind": (False, {"token_type": [9] * 10_000}, "tokenizer.ggml.token_type is an array"),
    "tokens": (True, {"tokens": "x"}, "tokenizer.ggml.tokens is 'x': expected an array of strings"),
    "twice": (True, {"tokens": ["a"] * 2, "token_type": None}, "has 'a' twice, as tokens 0 and 1"),
    "eos": (True, {"eos_token_id": 99_999}, "eos_token_id is 99999: expected a token id below"),
    "no scores": (False, {"scores": None}, "has no tokenizer.ggml.scores: expected an array"),
    "spaces": (False, {"remove_extra_whitespaces": True}, "remove_extra_whitespaces is true"),
    "prefix": (True, {"add_space_prefix": True}, "add_space_prefix is true; the tokenizer"),
    "separator": (True, {"add_sep_token": True}, "add_sep_token is true; only false is"),
    "no bos": (False, {"bos_token_id": None}, "has no tokenizer.ggml.bos_token_id: expected"),
    "unknown": (True, {"lowercase": True}, "lowercase (True) is not supported, and ignoring it"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tokenizer_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    is_byte_level, changes, words = BAD[case]
    path = write(
        tmp_path / "m.gguf", qwen2_entries() if is_byte_level else piece_entries, **changes
    )
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=re.escape(words)) as raised:
        tokenizer_of(path)
    assert "\n" not in str(raised.value)


def test_long_pieces_are_refused_before_their_merges_are_searched(tmp_path: Path) -> None:
    tokens, scores, kinds = pieces()
    path = write(
        tmp_path / "m.gguf",
        piece_entries,
        tokens=[*tokens, "x" * 100_000],
        scores=[*scores, 0.0],
        token_type=[*kinds, NORMAL],
    )
    with pytest.raises(UnsupportedModel, match="has a token of 100000 characters; at most 512"):
        tokenizer_of(path)
