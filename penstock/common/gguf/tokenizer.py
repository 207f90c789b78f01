"""Converts the tokenizer of a GGUF file to the `tokenizer.json` of the same model."""

from typing import Any, TypeAlias

from penstock.common.gguf.metadata import Metadata
from penstock.common.gguf.pre_tokenizers import PRE_TOKENIZERS
from penstock.common.gguf.vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
)

Json: TypeAlias = dict[str, Any]

SPACE = "\u2581"  # SentencePiece writes this character in place of a space
# Length limit of SentencePiece tokens, which bounds the time to find the merges of each token.
MAX_PIECE_CHARS = 512

NEUTRAL = {
    f"tokenizer.ggml.{name}"
    for name in (
        *("mask_token_id", "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
        *("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "prefix_token_id"),
        *("suffix_token_id", "middle_token_id", "scores", "merges", "cls_token_id"),
    )
}
"""Entries of GGUF files that do not change how a text is encoded.

Byte-level BPE does not use `scores`, and SentencePiece does not use `merges`.
"""


def convert_tokenizer(metadata: Metadata, vocabulary: Vocabulary) -> Json:
    """Return the content of tokenizer.json.

    Raises:
        BadCheckpoint: An entry is missing or invalid.
        UnsupportedModel: The kind of tokenizer or an entry that changes it is not supported.
    """
    kind = metadata.text("tokenizer.ggml.model")
    if kind == "gpt2":
        entries, add_bos = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        entries, add_bos = _sentence_piece(metadata, vocabulary)
    else:
        raise metadata.unsupported(
            f"tokenizer.ggml.model {kind!r:.40} is not supported: expected 'gpt2' or 'llama'"
        )
    found = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _post_processor(metadata, vocabulary, add_bos),
        **entries,
    }
    if metadata.flag("tokenizer.ggml.add_sep_token", False):
        raise metadata.unsupported("tokenizer.ggml.add_sep_token is true; only false is supported")
    metadata.refuse_unread("tokenizer.ggml.", NEUTRAL)
    return found


def _added_tokens(vocabulary: Vocabulary) -> list[Json]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": token, "content": text, "special": kind != USER_DEFINED, **plain}
        for token, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and text
    ]


def _post_processor(metadata: Metadata, vocabulary: Vocabulary, add_bos: bool) -> Json | None:
    """Return the step that adds BOS before a text, EOS after it, or both."""
    before = ["bos_token"] * metadata.flag("tokenizer.ggml.add_bos_token", add_bos)
    after = ["eos_token"] * metadata.flag("tokenizer.ggml.add_eos_token", False)
    if not before + after:
        return None
    for name in before + after:
        if name not in vocabulary.named:
            raise metadata.bad(
                f"tokenizer.ggml.{name}_id", "a token id, because this token is added to every text"
            )

    def around(sequence: str, type_id: int) -> list[Json]:
        special = [
            [{"SpecialToken": {"id": text_of(name), "type_id": type_id}} for name in names]
            for names in (before, after)
        ]
        return [*special[0], {"Sequence": {"id": sequence, "type_id": type_id}}, *special[1]]

    def text_of(name: str) -> str:
        return vocabulary.tokens[vocabulary.named[name]]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            text_of(name): {
                "id": text_of(name),
                "ids": [vocabulary.named[name]],
                "tokens": [text_of(name)],
            }
            for name in before + after
        },
    }


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Json, bool]:
    """Return the entries of tokenizer.json for byte-level BPE.

    The second result is True if BOS is added to texts by default.
    """
    name = metadata.text("tokenizer.ggml.pre")
    kind = PRE_TOKENIZERS.get(name)
    if kind is None:
        raise metadata.unsupported(
            f"tokenizer.ggml.pre {name!r:.40} is not supported: expected one of "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    for flag in ("add_space_prefix", "remove_extra_whitespaces"):
        if metadata.flag(f"tokenizer.ggml.{flag}", False):
            raise metadata.unsupported(
                f"tokenizer.ggml.{flag} is true; the tokenizer 'gpt2' supports only false"
            )
    merges = [merge.split(" ") for merge in metadata.strings("tokenizer.ggml.merges")]
    for number, merge in enumerate(merges):
        if len(merge) != 2:
            raise metadata.unsupported(
                f"tokenizer.ggml.merges[{number}] is {' '.join(merge)!r:.80}: expected two tokens "
                "with one space between them"
            )
    # The converter of llama.cpp fills gaps in the vocabulary with tokens [PADn]. Leave these out.
    vocab = {
        text: token
        for token, text in enumerate(vocabulary.tokens)
        if not (vocabulary.kinds[token] == UNUSED and text == f"[PAD{token}]")
    }
    model = _bpe(vocab, merges, ignore_merges=kind.ignore_merges)
    entries = {
        "normalizer": kind.normalizer,
        "pre_tokenizer": kind.pre_tokenizer(),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": model,
    }
    return entries, kind.add_bos


def _bpe(vocab: dict[str, int], merges: list[list[str]], **options: object) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
        **options,
    }


def _sentence_piece(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Json, bool]:
    """Return the entries of tokenizer.json for SentencePiece BPE.

    SentencePiece first joins the pair of tokens whose concatenation has the highest score. BPE of
    the `tokenizers` library first joins the pair that is earliest in its list of merges. This
    function therefore sorts the list of merges by score.

    The second result is True if BOS is added to texts by default.
    """
    if metadata.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        raise metadata.unsupported(
            "tokenizer.ggml.remove_extra_whitespaces is true; only false is supported"
        )
    pre = metadata.text("tokenizer.ggml.pre", "default")
    if pre != "default":
        raise metadata.unsupported(
            f"tokenizer.ggml.pre {pre!r:.40} is not supported for the tokenizer 'llama': expected "
            "'default'"
        )
    scores = metadata.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise metadata.bad(
            "tokenizer.ggml.scores",
            f"an array with a score for each of {len(vocabulary.tokens)} tokens",
        )
    unknown = [token for token, kind in enumerate(vocabulary.kinds) if kind == UNKNOWN]
    unknown = [vocabulary.named["unk_token"]] if "unk_token" in vocabulary.named else unknown
    replace: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizers: list[Json] = [replace]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        normalizers = [{"type": "Prepend", "prepend": SPACE}, replace]
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    entries: Json = {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            {text: token for token, text in enumerate(vocabulary.tokens)},
            _merges(metadata, vocabulary, scores),
            unk_token=vocabulary.tokens[unknown[0]] if unknown else None,
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.kinds,
        ),
    }
    return entries, True


def _merges(
    metadata: Metadata, vocabulary: Vocabulary, scores: list[int | float]
) -> list[list[str]]:
    """Return all pairs of tokens whose concatenation is a token, sorted by that token's score."""
    joined = {
        text: scores[token]
        for token, text in enumerate(vocabulary.tokens)
        if vocabulary.kinds[token] not in (UNKNOWN, CONTROL, BYTE)
    }
    found: list[tuple[float, int, str, str]] = []
    for text, score in joined.items():
        if len(text) > MAX_PIECE_CHARS:
            raise metadata.unsupported(
                f"tokenizer.ggml.tokens has a token of {len(text)} characters; at most "
                f"{MAX_PIECE_CHARS} are supported"
            )
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in joined and right in joined:
                found.append((-score, -at, left, right))
    found.sort()
    return [[left, right] for _, _, left, right in found]
