"""The vocabulary of constrained requests: all bytes, some words, and an end token.

Unconstrained requests use the hash model's own vocabulary.
"""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.common.grammar.cache import GrammarCache
from penstock.common.grammar.matcher import GrammarVocabulary
from penstock.common.text.token_bytes import byte_alphabet
from penstock.common.text.tokenizer import ModelTokenizer

WORDS = ('{"', '": "', '",', '"}', "[1", "true", "false", "null", "red", "blue", "name", "size")
"""Words that the tokenizer merges from left to right; each of their beginnings is a token too."""

NUM_BYTES = 256
END = NUM_BYTES + len({word[:end] for word in WORDS for end in range(2, len(word) + 1)})
"""The end token. The tokens below 256 are bytes."""

VOCAB_SIZE = END + 1


@cache
def grammars() -> GrammarCache:
    """Return the cache of compiled grammars of this process."""
    return GrammarCache(lambda: GrammarVocabulary(_tokenizer(), VOCAB_SIZE, [END]))


def text_of(tokens: Sequence[int]) -> bytes:
    """Return the text of an answer, without its end token."""
    pieces = _tokenizer().token_bytes
    return b"".join(pieces.bytes_of(token) for token in tokens if token != END)


@cache
def _tokenizer() -> ModelTokenizer:
    signs = {byte: char for char, byte in byte_alphabet().items()}
    vocab = {signs[byte]: byte for byte in range(NUM_BYTES)}
    merges = []
    for word in WORDS:
        written = "".join(signs[byte] for byte in word.encode())
        for end in range(2, len(written) + 1):
            if written[:end] not in vocab:
                vocab[written[:end]] = len(vocab)
                merges.append((written[: end - 1], written[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        return ModelTokenizer(Path(folder))
