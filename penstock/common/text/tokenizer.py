"""The tokenizer of a model, with its chat template and its detokenizer."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.common.gguf.checkpoint import is_gguf
from penstock.common.gguf.documents import tokenizer_config_of, tokenizer_of
from penstock.common.text.chat_source import SPECIAL_TOKEN_NAMES, ChatSource
from penstock.common.text.control_tokens import ControlTokens, Segment
from penstock.common.text.detokenizer import IncrementalDetokenizer, StopOptions
from penstock.common.text.named_templates import read_templates
from penstock.common.text.token_bytes import TokenBytes, UnsupportedTokenizer

_MARKER = re.compile(r"<([|\uff5c]).+\1>", re.DOTALL)
"""The form of role markers, such as `<|user|>`. DeepSeek uses the fullwidth bar U+FF5C."""

_WITH_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
"""Tokenizers of transformers that add a BOS themselves if `add_bos_token` is true."""


class ModelTokenizer:
    """The tokenizer and the detokenizer of one model. Thread-safe.

    Args:
        folder: a GGUF file, or a checkpoint folder with tokenizer.json. For chats, the folder also
            has tokenizer_config.json or chat_template.jinja.
        chat_template: text of a chat template that replaces the model's own.

    Raises:
        UnsupportedTokenizer: a file is missing, broken or of an unsupported kind.
        BadCheckpoint: the GGUF file is invalid.
        UnsupportedModel: the GGUF file is not supported.

    Attributes:
        tokenizer: the tokenizer of the `tokenizers` library, without padding and truncation.
        token_bytes: the bytes of each token.
        vocab_size: number of tokens, with the added tokens.
        longest_token: number of characters of the longest token in the vocabulary.
        chat_template: the source of the chat template, or None if the model has none.
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        self.tokenizer = _load(folder)
        config = _read_config(folder)
        if _needs_bos(self.tokenizer, config):
            _add_bos(self.tokenizer, _content(config["bos_token"]))
        self.token_bytes = TokenBytes(self.tokenizer)
        self.vocab_size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.longest_token = max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)))
        template = read_templates(folder, config) if chat_template is None else chat_template
        names = {name: _content(config[name]) for name in SPECIAL_TOKEN_NAMES if config.get(name)}
        added = self.tokenizer.get_added_tokens_decoder()
        self._markers = [each for each in added.values() if _is_marker(each, template or "")]
        marked = {each.content for each in self._markers}
        control = tuple(
            entry.content
            for _, entry in sorted(added.items())
            if entry.special or entry.content in marked
        )
        self.chat_template = None if template is None else ChatSource(template, names, control)
        self._control = ControlTokens(control)
        self._plain: Tokenizer | None = None  # created on first use, because it is rarely needed

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Args:
            text: any text.
            add_special_tokens: whether to add the special tokens that tokenizer.json prescribes.
        """
        (tokens,) = _encode_all(self.tokenizer, [text], add_special_tokens)
        return tokens

    def encode_without_control(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, encoding the text of control tokens as ordinary text."""
        if not self._control.occur_in(text):
            return self.encode(text, add_special_tokens)
        (tokens,) = _encode_all(self._plain_tokenizer(), [text], add_special_tokens)
        return tokens

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return one or two token sequences for each word.

        The first sequence is the word at the start of a text, the second is the word after a space.
        As in vLLM, the second sequence is included only if both have the same length and different
        first tokens. In this case, it is the form that the word has inside a sentence.
        """
        texts = [lead + word.lstrip() for word in words for lead in ("", " ")]
        encoded = _encode_all(self.tokenizer, texts, False)
        found = []
        for bare, spaced in zip(encoded[::2], encoded[1::2], strict=True):
            found.append(bare)
            if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
                found.append(spaced)
        return found

    def has_control_tokens(self, value: object) -> bool:
        """Return whether a string of `value` contains the text of a control token.

        Encoding such a text as ordinary text needs a second tokenizer, which is created at the
        first use. The creation is slow.

        Args:
            value: a string, or nested lists and mappings of strings.
        """
        return self._control.occur_in(value)

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Return the token ids of a rendered chat.

        No BOS is added, because the chat template writes one.
        """
        tokens: list[int] = []
        for text, is_plain in segments:
            tokenizer = self._plain_tokenizer() if is_plain else self.tokenizer
            (found,) = _encode_all(tokenizer, [text], False)
            tokens += found
        return tokens

    def _plain_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that encodes the text of control tokens as ordinary text."""
        if self._plain is None:
            plain = Tokenizer.from_str(self.tokenizer.to_str())
            plain.encode_special_tokens = True
            # Make all control tokens special, because the option affects only special tokens.
            plain.add_special_tokens(self._markers)
            # Assign the attribute last, because other threads may use it as soon as it is set.
            self._plain = plain
        return self._plain

    def detokenizer(self, options: StopOptions) -> IncrementalDetokenizer:
        """Return a detokenizer for a new answer."""
        return IncrementalDetokenizer(self.token_bytes, options)


def _encode_all(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[list[int]]:
    # This batch call computes no offsets and releases the GIL.
    batch = tokenizer.encode_batch_fast(texts, add_special_tokens=special)
    return [encoding.ids for encoding in batch]


def _load(folder: Path) -> Tokenizer:
    path = folder if is_gguf(folder) else folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedTokenizer(
            f"{path} is missing, but the model needs this file: copy or download the file"
        )
    content = json.dumps(tokenizer_of(path)) if is_gguf(folder) else None
    try:
        tokenizer = Tokenizer.from_str(content) if content else Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise UnsupportedTokenizer(f"{path} cannot be read: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _needs_bos(tokenizer: Tokenizer, config: Mapping[str, Any]) -> bool:
    """Return whether `add_bos_token` of tokenizer_config.json requires a BOS.

    This is False if tokenizer.json already adds special tokens.
    """
    if config.get("add_bos_token") is not True or not config.get("bos_token"):
        return False
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    if kind not in _WITH_BOS or tokenizer.num_special_tokens_to_add(False) > 0:
        return False
    return tokenizer.token_to_id(_content(config["bos_token"])) is not None


def _add_bos(tokenizer: Tokenizer, bos: str) -> None:
    """Let the tokenizer begin each text with a BOS. Chats are encoded without special tokens."""
    token = tokenizer.token_to_id(bos)
    tokenizer.post_processor = TemplateProcessing(
        single=["bos", "$A"],
        pair=["bos", "$A", "$B"],
        special_tokens=[{"id": "bos", "ids": [token], "tokens": [bos]}],
    )


def _is_marker(token: AddedToken, template: str) -> bool:
    """Return whether a token is a role marker of a chat template, but not a special token.

    DeepSeek's role markers are not special tokens.
    """
    text = token.content
    return not token.special and text in template and _MARKER.fullmatch(text) is not None


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, or {} if there is none."""
    if is_gguf(folder):
        return tokenizer_config_of(folder)
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedTokenizer(f"{path} cannot be parsed as JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _content(token: object) -> str:
    """Return the text of a special token: the string itself, or the `content` of an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
