"""A model's tokenizer with its chat template and detokenizer."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.common.text.chat_template import ChatTemplate, ChatTemplateError
from penstock.common.text.detokenizer import IncrementalDetokenizer, StopOptions
from penstock.common.text.token_bytes import TokenBytes, UnsupportedTokenizer

INLINE_CHARS = 4096
"""Texts up to this length are tokenized on the event loop, in about a millisecond."""

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class ModelTokenizer:
    """Tokenizer, chat template and detokenizer of one model.

    Args:
        folder: a checkpoint folder with tokenizer.json and, for chats, tokenizer_config.json or
            chat_template.jinja.

    Raises:
        UnsupportedTokenizer: a file is missing, broken or of an unsupported kind.

    Attributes:
        tokenizer: the tokenizer of the `tokenizers` library, without padding and truncation.
        token_bytes: the bytes of each token.
        vocab_size: number of tokens, added tokens included.
        chat_template: the compiled chat template, or None if the model has none.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = _load(folder)
        self.token_bytes = TokenBytes(self.tokenizer)
        self.vocab_size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.chat_template = _read_template(folder)
        # Use one thread: long texts wait for each other and do not block the event loop.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Args:
            text: any text. Long texts are tokenized in another thread.
            add_special_tokens: whether to add the special tokens that tokenizer.json prescribes.
        """
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        (tokens,) = await self._encode_in_thread([text], add_special_tokens)
        return tokens

    async def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences of each word at the start of a text and after a space.

        As in vLLM, the sequence after a space is included only if both sequences have the same
        length and different first tokens. It is then the word's form inside a sentence.
        """
        texts = [lead + word.lstrip() for word in words for lead in ("", " ")]
        if sum(map(len, texts)) <= INLINE_CHARS:
            encoded = [await self.encode(text, add_special_tokens=False) for text in texts]
        else:
            encoded = await self._encode_in_thread(texts, False)
        found = []
        for bare, spaced in zip(encoded[::2], encoded[1::2], strict=True):
            found.append(bare)
            if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
                found.append(spaced)
        return found

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation; no BOS is added, because templates write one.

        Raises:
            ChatTemplateError: the model has no chat template, or the template fails.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "this model has no chat template: send a prompt to the completions API instead"
            )
        try:
            text = self.chat_template.render(messages)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"the model's chat template: {error}") from error
        return await self.encode(text, add_special_tokens=False)

    def detokenizer(self, options: StopOptions) -> IncrementalDetokenizer:
        """Return a detokenizer for a new answer."""
        return IncrementalDetokenizer(self.token_bytes, options)

    def close(self) -> None:
        """Stop the tokenizer thread and cancel pending texts."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _encode_in_thread(self, texts: list[str], special: bool) -> list[list[int]]:
        def encode() -> list[list[int]]:
            # This batch call computes no offsets and releases the GIL.
            batch = self.tokenizer.encode_batch_fast(texts, add_special_tokens=special)
            return [encoding.ids for encoding in batch]

        return await asyncio.get_running_loop().run_in_executor(self._executor, encode)


def _load(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedTokenizer(f"{folder} holds no tokenizer.json: every model needs one")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise UnsupportedTokenizer(f"{path} cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_template(folder: Path) -> ChatTemplate | None:
    config = _read_config(folder / "tokenizer_config.json")
    source = config.get("chat_template")
    if isinstance(source, list):  # a list of named templates
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        source = beside.read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    names = {name: _content(config[name]) for name in SPECIAL_TOKEN_NAMES if config.get(name)}
    try:
        return ChatTemplate(source, names)
    except ValueError as error:
        raise UnsupportedTokenizer(f"{folder}: {error}") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedTokenizer(f"{path} is not valid JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _content(token: str | dict[str, Any]) -> str:
    """Return the text of a special token: the string itself, or the `content` of an object."""
    return token if isinstance(token, str) else str(token["content"])
