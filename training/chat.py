"""The chat format of the demo models, as Jinja templates and as a Python function.

A conversation with tools starts with a system turn that lists the tools, one per line. The model
writes tool calls in the format of Hermes and Qwen. The result of a call is a user turn that starts
with `RESULT`:

    <|begin|><|system|>Tools:
    lookup(key: string): Returns the entry of a key.<|end|>
    <|user|>Look up K7X2.<|end|>
    <|assistant|><tool_call>{"name": "lookup", "arguments": {"key": "K7X2"}}</tool_call><|end|>
    <|user|>Result: red<|end|>
    <|assistant|>The entry of "K7X2" is red.<|end|>

The line breaks after `<|end|>` are not part of the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from training.tasks import Message, Tool
from training.tasks.base import call_text

PAD = "<|pad|>"
BEGIN = "<|begin|>"
END = "<|end|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)
# The space at the end is a part of this text. The first word of the result therefore has the same
# tokens as in an answer, so that the model can copy it.
RESULT = "Result: "

TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TOOL_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n' }}{% endif %}"
    "{{ 'Tools:' }}"
    "{% for tool in tools %}"
    "{% set function = tool['function'] %}"
    "{% set properties = (function['parameters'] or {})['properties'] %}"
    "{{ '\n' + function['name'] + '(' }}"
    "{% for name, schema in (properties if properties is mapping else {}).items() %}"
    "{{ name }}"
    "{% if schema['type'] is string %}{{ ': ' + schema['type'] }}{% endif %}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}"
    "{% endfor %}"
    "{{ ')' }}"
    "{% if function['description'] %}{{ ': ' + function['description'] }}{% endif %}"
    "{% endfor %}"
    "{{ eos_token }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|>Result: ' + message['content'] + eos_token }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set function = call['function'] %}"
    "{% set arguments = function['arguments'] %}"
    """{{ '<tool_call>{"name": ' + function['name'] | tojson + ', "arguments": ' }}"""
    "{{ arguments if arguments is string else arguments | tojson }}"
    "{{ '}</tool_call>' }}"
    "{% endfor %}"
    "{{ eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render(
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Render a conversation as the model's input text.

    The result equals the output of the Jinja template `TOOL_TEMPLATE`.
    """
    shown = list(messages)
    text = BEGIN
    if tools:
        has_system = bool(shown) and shown[0]["role"] == "system"
        system = shown.pop(0)["content"] + "\n" if has_system else ""
        text += SYSTEM + system + "\n".join(["Tools:", *map(_signature, tools)]) + END
    text += "".join(map(_rendered, shown))
    return text + (ASSISTANT if add_generation_prompt else "")


def _signature(tool: Tool) -> str:
    function = tool["function"]
    properties: Mapping[str, Any] = function.get("parameters", {}).get("properties", {})
    names = (
        f"{name}: {schema['type']}" if "type" in schema else name
        for name, schema in properties.items()
    )
    description = function.get("description", "")
    return f"{function['name']}({', '.join(names)})" + (f": {description}" if description else "")


def _rendered(message: Message) -> str:
    if message["role"] == "tool":
        return f"{USER}{RESULT}{message['content']}{END}"
    functions = (call["function"] for call in message.get("tool_calls", ()))
    calls = "".join(call_text(each["name"], each["arguments"]) for each in functions)
    return f"<|{message['role']}|>{message['content'] or ''}{calls}{END}"
