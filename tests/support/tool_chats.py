"""A chat with tools, and a chat template that writes all parts of the chat."""

from typing import Any

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if documents %}{{ documents | tojson }}{% endif %}{{ variable }}"
    "{% for m in messages %}[{{ m.role }} {{ m.name }} {{ m.tool_call_id }}]"
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.id }} {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %})"
    "{% endfor %}</s>{% endfor %}{# <tool_call> #}"
)
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 17, "b": 25}'},
}
HISTORY: list[Any] = [
    {"role": "user", "content": "sum?", "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "add them"},
    {"role": "tool", "tool_call_id": "call_1", "content": "42"},
]
RENDERED = (
    "[user ann ]sum?</s>[assistant  ]<add them>(call_1 add a=17 b=25)</s>[tool  call_1]42</s>"
)
"""The prompt that the template makes of `HISTORY`."""
