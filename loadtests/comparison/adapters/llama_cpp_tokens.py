"""Prints the token ids that llama.cpp gives for texts.

`python llama_cpp_tokens.py FILE.gguf` reads a JSON list of texts from stdin and prints a JSON list
of lists of token ids. The texts are encoded without special tokens, and the names of control tokens
in a text are encoded as text.
"""

import ctypes
import json
import os
import sys
from typing import Any

import llama_cpp


def main() -> None:
    """Load the vocabulary, encode the texts, and print the ids."""
    # llama.cpp's own output goes to stderr, so that the real stdout has only the ids.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), parameters)
    if not model:
        raise SystemExit(f"llama.cpp could not load {sys.argv[1]}")
    vocab = llama_cpp.llama_model_get_vocab(model)
    print(json.dumps([_encode(vocab, text) for text in json.load(sys.stdin)]), file=answers)


def _encode(vocab: Any, text: str) -> list[int]:
    content = text.encode()
    most = len(content) + 8
    tokens = (ctypes.c_int32 * most)()
    count = llama_cpp.llama_tokenize(vocab, content, len(content), tokens, most, False, False)
    if count < 0:
        raise SystemExit(f"llama.cpp needs more than {most} tokens for {text!r}")
    return list(tokens[:count])


if __name__ == "__main__":
    main()
