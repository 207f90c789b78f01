"""Render and encode chats in the process of the test."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common.text.chat_renderer import ChatRenderer
from penstock.common.text.tokenizer import ModelTokenizer


def renderer_of(tokenizer: ModelTokenizer) -> ChatRenderer:
    """Return the compiled chat template of a model."""
    assert tokenizer.chat_template is not None
    return ChatRenderer(tokenizer.chat_template)


def encode_chat(tokenizer: ModelTokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of a conversation."""
    return tokenizer.encode_segments(renderer_of(tokenizer).render(messages))
