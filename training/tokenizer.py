"""Trains the byte-level BPE tokenizer of the demo models on generated questions and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training import chat
from training.tasks import FAMILIES

VOCAB_SIZE = 2048
MAX_LENGTH = 2048
# Pattern of the words into which a text is split before BPE. Each digit is a token of its own, so
# that a number always consists of the same tokens. A space before a capitalized word is also a
# token of its own. A name therefore has the same tokens after a space, after a quote and after the
# start of a turn, so that the model can copy the name token by token.
_WORDS = Regex(r"\p{N}|\p{Lu}\p{Ll}*| ?\p{Ll}+| ?[^\s\p{L}\p{N}]+|\p{L}|\s")


def train(seed: int, num_examples: int = 40_000) -> Tokenizer:
    """Train a tokenizer on generated examples."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(chat.SPECIAL_TOKENS),
        # All 256 bytes are tokens, so any text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(Random(seed), num_examples), trainer)
    return tokenizer


def _text(rng: Random, num_examples: int) -> Iterator[str]:
    # Leave out families with tools. They are trained in later stages, which continue the training
    # of a model that already has a tokenizer.
    families = [family for family in FAMILIES.values() if not family.tools]
    for _ in range(num_examples):
        example = rng.choice(families).training_example(rng)
        yield example.prompt
        yield example.answer


def save(tokenizer: Tokenizer, folder: Path, template: str = chat.TEMPLATE) -> None:
    """Write the tokenizer in the format that `transformers.AutoTokenizer` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chat.BEGIN,
        "eos_token": chat.END,
        "pad_token": chat.PAD,
        "additional_special_tokens": [chat.SYSTEM, chat.USER, chat.ASSISTANT],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
