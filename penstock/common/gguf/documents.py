"""Makes the JSON files of a checkpoint folder from the metadata of a GGUF file.

The readers of `config.json`, `generation_config.json`, `tokenizer.json` and `tokenizer_config.json`
call this module if the checkpoint is a GGUF file.
"""

from pathlib import Path
from typing import Any, TypeAlias

from penstock.common.gguf.checkpoint import open_gguf
from penstock.common.gguf.config import read_config
from penstock.common.gguf.metadata import Metadata, shortest
from penstock.common.gguf.tokenizer import convert_tokenizer
from penstock.common.gguf.vocabulary import Vocabulary, read_vocabulary

Json: TypeAlias = dict[str, Any]

CHAT_TEMPLATE = "tokenizer.chat_template"

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""The name in generation_config.json of each entry below `general.sampling.`."""


def config_of(path: Path) -> Json:
    """Return the content of config.json for a GGUF file.

    Raises:
        BadCheckpoint: The file is missing, truncated or invalid.
        UnsupportedModel: The file is valid, but not supported. The message names the entry.
    """
    checkpoint = open_gguf(path)
    vocabulary = read_vocabulary(checkpoint.metadata)
    config = read_config(checkpoint, vocabulary.ends)
    if len(vocabulary.tokens) > config["vocab_size"]:
        raise checkpoint.metadata.bad(
            "tokenizer.ggml.tokens",
            f"an array of at most {config['vocab_size']} items (the rows of token_embd.weight)",
        )
    return config


def generation_config_of(path: Path) -> Json:
    """Return the content of generation_config.json for a GGUF file.

    Raises the exceptions of `config_of`.
    """
    metadata = open_gguf(path).metadata
    found: Json = {}
    for key, name in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            found[name] = shortest(value) if isinstance(value, float) else value
    return found


def tokenizer_of(path: Path) -> Json:
    """Return the content of tokenizer.json for a GGUF file.

    Raises the exceptions of `config_of`.
    """
    metadata = open_gguf(path).metadata
    return convert_tokenizer(metadata, read_vocabulary(metadata))


def tokenizer_config_of(path: Path) -> Json:
    """Return the content of tokenizer_config.json for a GGUF file.

    Raises the exceptions of `config_of`.
    """
    metadata = open_gguf(path).metadata
    found: Json = dict(_named_texts(read_vocabulary(metadata)))
    if metadata.get(CHAT_TEMPLATE) is not None:
        found["chat_template"] = metadata.text(CHAT_TEMPLATE)
    return found


def has_chat_template(path: Path) -> bool:
    """Return whether a GGUF file has a chat template.

    Raises the exceptions of `config_of`.
    """
    metadata: Metadata = open_gguf(path).metadata
    return bool(metadata.text(CHAT_TEMPLATE, ""))


def _named_texts(vocabulary: Vocabulary) -> Json:
    return {name: vocabulary.tokens[token] for name, token in vocabulary.named.items()}
