"""Reads the vocabulary and the special tokens of a GGUF file (`tokenizer.ggml.*`)."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.common.gguf.metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens in `tokenizer.ggml.token_type`."""

ENDS_OF_ANSWERS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
        *("<|return|>", "<|call|>", "<|end_of_text|>", "<|endofturn|>"),
    )
)
"""Tokens that end an answer even if no metadata entry names them. llama.cpp has a similar list."""

NAMES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
"""Keys of the special tokens to which a chat template may refer.

`seperator` is the spelling of GGUF.
"""

_ENDS = (NAMES["eos_token"], "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        tokens: Text of each token, by id.
        kinds: Kind of each token, by id.
        named: Id of each special token that the file defines, by name. The names are keys of
            `NAMES`.
        ends: Ids of the tokens that end an answer.
    """

    tokens: list[str]
    kinds: list[int]
    named: Mapping[str, int]
    ends: list[int]


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Read the tokens, their kinds and the special tokens of a model.

    Raises:
        BadCheckpoint: A list has a wrong length, a kind is unknown, or an id does not exist.
        UnsupportedModel: A token appears twice.
    """
    tokens = metadata.strings("tokenizer.ggml.tokens")
    numbers = metadata.numbers("tokenizer.ggml.token_type")
    if not tokens:
        raise metadata.bad("tokenizer.ggml.tokens", "an array of at least one string")
    kinds = [NORMAL] * len(tokens) if numbers is None else numbers
    if len(kinds) != len(tokens):
        raise metadata.bad(
            "tokenizer.ggml.token_type", f"an array with a type for each of {len(tokens)} tokens"
        )
    if not set(kinds) <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
        raise metadata.bad(
            "tokenizer.ggml.token_type", f"an array of token types ({NORMAL} to {BYTE})"
        )
    kinds = [int(kind) for kind in kinds]
    _check_distinct(metadata, tokens)
    named = {}
    for name, key in NAMES.items():
        token = _token(metadata, key, len(tokens))
        if token is not None:
            named[name] = token
    ends = [token for key in _ENDS if (token := _token(metadata, key, len(tokens))) is not None]
    ends += [
        token
        for token, text in enumerate(tokens)
        if text in ENDS_OF_ANSWERS and kinds[token] in (CONTROL, USER_DEFINED)
    ]
    for token in (*named.values(), *ends):
        if kinds[token] in (NORMAL, USER_DEFINED, UNUSED):
            kinds[token] = CONTROL
    return Vocabulary(tokens, kinds, named, list(dict.fromkeys(ends)))


def _token(metadata: Metadata, key: str, num_tokens: int) -> int | None:
    if metadata.get(key) is None:
        return None
    token = metadata.count(key)
    if token >= num_tokens:
        raise metadata.bad(key, f"a token id below {num_tokens}")
    return token


def _check_distinct(metadata: Metadata, tokens: list[str]) -> None:
    known = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(known) == len(tokens):
        return
    for token, text in enumerate(tokens):
        if known[text] != token:
            raise metadata.unsupported(
                f"tokenizer.ggml.tokens has {text!r:.80} twice, as tokens {token} and "
                f"{known[text]}: texts of tokens must be unique"
            )
