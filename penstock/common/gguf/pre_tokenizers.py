"""Normalizers and pre-tokenizers of byte-level BPE, by the value of `tokenizer.ggml.pre`.

Each of them is copied from the `tokenizer.json` of the models that its key names. llama.cpp has the
same regular expressions in `llama-vocab.cpp`.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The parts of a tokenizer that depend on `tokenizer.ggml.pre`.

    Attributes:
        steps: Steps of the pre-tokenizer before the step that maps bytes to characters.
        gpt2_words: Whether the mapping step also splits the text into words, as GPT-2 does.
        normalizer: The normalizer, or None.
        ignore_merges: Whether a word that is a token is used as it is, without merges.
        add_bos: Default of `tokenizer.ggml.add_bos_token`.
    """

    steps: tuple[Json, ...] = ()
    gpt2_words: bool = False
    normalizer: Json | None = None
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> Json:
        """Return the entry `pre_tokenizer` of tokenizer.json."""
        bytes_to_characters = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": self.gpt2_words,
        }
        return {"type": "Sequence", "pretokenizers": [*self.steps, bytes_to_characters]}


def _split(*alternatives: str) -> Json:
    pattern = {"Regex": "|".join(alternatives)}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_SIGNS, _SIGNS_OR_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")

_GPT2 = PreTokenizer(gpt2_words=True)
_LLAMA3_WORDS = (_ENDINGS, _LETTERS, r"\p{N}{1,3}", _SIGNS, *_SPACES)
_LLAMA3 = PreTokenizer((_split(*_LLAMA3_WORDS),), ignore_merges=True, add_bos=True)
_GPT4 = PreTokenizer((_split(*_LLAMA3_WORDS),))
_QWEN2 = PreTokenizer(
    (_split(_ENDINGS, _LETTERS, r"\p{N}", _SIGNS, *_SPACES),), normalizer={"type": "NFC"}
)
_GPT4O = PreTokenizer(
    (
        _split(
            *(words + _ENDINGS + "?" for words in _CASED),
            *(r"\p{N}{1,3}", _SIGNS_OR_SLASHES, *_SPACES),
        ),
    )
)
_TEKKEN = PreTokenizer(
    (_split(*_CASED, r"\p{N}", _SIGNS_OR_SLASHES, *_SPACES),), ignore_merges=True, add_bos=True
)
_SINGLE_DIGITS = PreTokenizer(({"type": "Digits", "individual_digits": True},), gpt2_words=True)

PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    "dbrx": _GPT4,  # Phi-4 models have this value as well
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    "smollm": _SINGLE_DIGITS,
}
"""The supported pre-tokenizers, by the value of `tokenizer.ggml.pre`."""
