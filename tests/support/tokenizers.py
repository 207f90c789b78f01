"""Small tokenizers of the kinds that models use, and checkpoint folders with them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind at all",
    "grüße aus köln, naïve café, 12 + 34 = 46, the end of the story is the end",
    "日本語の文章です。日本 emoji 😀😀 family 👩‍👩‍👧 and   spaces\n\tlines",
]
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _special() -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in SPECIAL]


def byte_level() -> Tokenizer:
    """Return a tokenizer like those of GPT-2, Llama 3 and Qwen.

    Bytes are mapped to printable characters; the post-processor adds BOS.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(_special())
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("→plain→")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _pieces() -> dict[str, int]:
    vocab = {name: index for index, name in enumerate(SPECIAL)}
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    names += [*"▁abcdefghijklmnopqrstuvwxyzäöü日本,.", "▁the", "▁do", "in", "▁▁", "er", "▁a"]
    for name in names:
        vocab.setdefault(name, len(vocab))
    return vocab


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like Llama 2's: spaces become "▁", and unknown characters become bytes."""
    vocab = _pieces()
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(_special())
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer like T5's, whose only decoder is Metaspace."""
    tokenizer = Tokenizer(models.BPE(_pieces(), [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(_special())
    return tokenizer


KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback, "metaspace": metaspace}


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None = TEMPLATE) -> Path:
    """Write the files of a checkpoint that a router reads: configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": 2048, "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config))
    names: dict[str, object] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if template is not None:
        names["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def id_of(tokenizer: Tokenizer, name: str) -> int:
    """Return the id of an existing token."""
    token = tokenizer.token_to_id(name)
    assert token is not None
    return token
