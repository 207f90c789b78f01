"""A model's tokenizer: what the router knows of its text."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.router.errors import invalid
from penstock.router.text.answer import AnswerText, TextRules
from penstock.router.text.pieces import Pieces, UnsupportedTokenizer
from penstock.router.text.template import ChatTemplate, TemplateRefused

INLINE_CHARS = 4096
"""Texts up to this length are tokenized in the event loop, which takes a millisecond."""

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class TextModel:
    """Tokenizer, chat template and detokenizer of one model.

    Args:
        folder: a checkpoint folder with tokenizer.json and, for chats, tokenizer_config.json or
            chat_template.jinja. `UnsupportedTokenizer` says what is missing or not served.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = _load(folder)
        self.pieces = Pieces(self.tokenizer)
        self.vocab_size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.template = _read_template(folder)
        # One thread: long texts wait for each other, not the event loop for them.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; the special tokens that are added are those of tokenizer.json."""
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        (tokens,) = await self._encode_aside([text], add_special_tokens)
        return tokens

    async def bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences that spell the words, at the start of a text and after a space.

        As vLLM does it: the form after a space counts if it begins with another token and has as
        many; then it is a token's own form for the middle of a sentence.
        """
        texts = [lead + word.lstrip() for word in words for lead in ("", " ")]
        if sum(map(len, texts)) <= INLINE_CHARS:
            forms = [await self.encode(text, add_special_tokens=False) for text in texts]
        else:
            forms = await self._encode_aside(texts, False)
        found = []
        for bare, spaced in zip(forms[::2], forms[1::2], strict=True):
            found.append(bare)
            if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
                found.append(spaced)
        return found

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation. The template writes its own BOS, so none is added."""
        if self.template is None:
            raise invalid(
                "this model has no chat template: send a prompt to the completions API instead",
                "messages",
            )
        try:
            text = self.template.render(messages)
        except TemplateRefused as error:
            raise invalid(f"the model's chat template: {error}", "messages") from error
        return await self.encode(text, add_special_tokens=False)

    def answer(self, rules: TextRules) -> AnswerText:
        """What turns the tokens of a new answer into text."""
        return AnswerText(self.pieces, rules)

    def close(self) -> None:
        self._aside.shutdown(wait=False, cancel_futures=True)

    async def _encode_aside(self, texts: list[str], special: bool) -> list[list[int]]:
        def encode() -> list[list[int]]:
            # The batch form keeps no offsets and lets go of the interpreter lock.
            batch = self.tokenizer.encode_batch_fast(texts, add_special_tokens=special)
            return [encoding.ids for encoding in batch]

        return await asyncio.get_running_loop().run_in_executor(self._aside, encode)


def _load(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedTokenizer(f"{folder} holds no tokenizer.json: the router needs one")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedTokenizer(f"{path} cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_template(folder: Path) -> ChatTemplate | None:
    config = _read_config(folder / "tokenizer_config.json")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        source = beside.read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    names = {name: _content(config[name]) for name in SPECIAL_NAMES if config.get(name)}
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
    """A special token is written as a string or as an object with its content."""
    return token if isinstance(token, str) else str(token["content"])
