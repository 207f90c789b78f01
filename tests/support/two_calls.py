"""Answers with two calls, in each format of tool calls."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.router.parsers.tools.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEP
from penstock.router.parsers.tools.kimi import ARGUMENT_BEGIN, SECTION_BEGIN, SECTION_END
from penstock.router.parsers.tools.kimi import CALL_BEGIN as KIMI_BEGIN
from penstock.router.parsers.tools.kimi import CALL_END as KIMI_END

Values: TypeAlias = Mapping[str, int]

FUNCTIONS: Sequence[Mapping[str, Any]] = [
    {
        "name": name,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    for name in ("add", "mul")
]
"""The functions that are called in the answers of this file."""

FIRST, SECOND = ("add", {"a": 17, "b": 25}), ("mul", {"a": 3})


def _listed(calls: Sequence[tuple[str, Values]], key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {json.dumps(values)}}}' for name, values in calls]


def _each(
    write: Callable[[str, Values], str], before: str = "", between: str = "", after: str = ""
) -> Callable[..., str]:
    def written(*calls: tuple[str, Values]) -> str:
        return before + between.join(write(*call) for call in calls) + after

    return written


def _array(before: str, after: str = "") -> Callable[..., str]:
    return lambda *calls: f"{before}[{', '.join(_listed(calls))}]{after}"


def _qwen(name: str, values: Values) -> str:
    texts = [f"\n<parameter={key}>\n{value}\n</parameter>" for key, value in values.items()]
    return f"<function={name}>{''.join(texts)}\n</function>"


def _glm(name: str, values: Values) -> str:
    texts = [
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{each}</arg_value>" for key, each in values.items()
    ]
    return f"<tool_call>{name}{''.join(texts)}\n</tool_call>"


def _gemma(begin: str, end: str) -> Callable[..., str]:
    def written(name: str, values: Values) -> str:
        members = ",".join(f"{key}:{value}" for key, value in values.items())
        return f"{begin}call:{name}{{{members}}}{end}"

    return _each(written)


def _python(name: str, values: Values) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})"


def _harmony(name: str, values: Values) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{header}{json.dumps(values)}<|call|>"


_LLAMA: Callable[..., str] = lambda *calls: "; ".join(_listed(calls, "parameters"))  # noqa: E731
_PYTHON = _each(_python, "[", ", ", "]")
_DEEPSEEK = {"before": CALLS_BEGIN, "after": CALLS_END}

WRITERS: Mapping[str, Sequence[Callable[..., str]]] = {
    "hermes": [
        _each(
            lambda name, values: f"<tool_call>\n{_listed([(name, values)])[0]}\n</tool_call>",
            between="\n",
        )
    ],
    "llama3_json": [_LLAMA, lambda *calls: f"<|python_tag|>{_LLAMA(*calls)}"],
    "llama4_json": [_LLAMA],
    "mistral": [
        _array("[TOOL_CALLS]"),
        _each(lambda name, values: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values)}"),
    ],
    "phi4_mini_json": [_array("<|tool_call|>", "<|/tool_call|>"), _array("functools")],
    "deepseek_v31": [
        _each(
            lambda name, values: f"{CALL_BEGIN}{name}{SEP}{json.dumps(values)}{CALL_END}",
            **_DEEPSEEK,
        )
    ],
    "deepseek_v3": [
        _each(
            lambda name, values: (
                f"{CALL_BEGIN}function{SEP}{name}\n```json\n{json.dumps(values)}\n```{CALL_END}"
            ),
            **_DEEPSEEK,
        )
    ],
    "kimi_k2": [
        _each(
            lambda name, values: (
                f"{KIMI_BEGIN}functions.{name}:0{ARGUMENT_BEGIN}{json.dumps(values)}{KIMI_END}"
            ),
            SECTION_BEGIN,
            "",
            SECTION_END,
        )
    ],
    "qwen3_coder": [
        _each(lambda *call: f"<tool_call>\n{_qwen(*call)}\n</tool_call>", between="\n"),
        _each(_qwen, between="\n"),
    ],
    "qwen3_xml": [_each(lambda *call: f"<tool_call>\n{_qwen(*call)}\n</tool_call>")],
    "glm45": [_each(_glm, between="\n")],
    "glm47": [_each(_glm)],
    "functiongemma": [_gemma("<start_function_call>", "<end_function_call>")],
    "gemma4": [_gemma("<|tool_call>", "<tool_call|>")],
    "pythonic": [_PYTHON],
    "llama4_pythonic": [_PYTHON, lambda *calls: f"<|python_start|>{_PYTHON(*calls)}<|python_end|>"],
    "openai": [_each(_harmony, between="<|start|>assistant")],
}
"""For each format: functions that write an answer with the given calls, one function for each way
of writing."""
