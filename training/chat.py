"""The chat format of the demo models, as a Jinja template and as a Python function."""

from __future__ import annotations

from collections.abc import Sequence

from training.tasks import Message

PAD = "<|pad|>"
BEGIN = "<|begin|>"
END = "<|end|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)

TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render(messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    """Render a conversation as the model's input text; equals the output of `TEMPLATE`."""
    rendered = (f"<|{message['role']}|>{message['content']}{END}" for message in messages)
    return BEGIN + "".join(rendered) + (ASSISTANT if add_generation_prompt else "")
