"""The parsers by name, and the choice of a parser by the model's chat template.

The names are those of vLLM's flags `--tool-call-parser` and `--reasoning-parser`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common.argument_notation import ArgumentNotation
from penstock.router.parsers.harmony import HarmonyParser
from penstock.router.parsers.reader import Reader
from penstock.router.parsers.think import Tags
from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar
from penstock.router.parsers.tools.deepseek import CALL_BEGIN, DeepSeekV3Parser, DeepSeekV31Parser
from penstock.router.parsers.tools.gemma import FunctionGemmaParser, Gemma4Parser
from penstock.router.parsers.tools.glm import GlmParser
from penstock.router.parsers.tools.hermes import HermesParser
from penstock.router.parsers.tools.kimi import SECTION_BEGIN, KimiParser
from penstock.router.parsers.tools.llama_json import LlamaJsonParser
from penstock.router.parsers.tools.mistral import MistralParser
from penstock.router.parsers.tools.phi import PhiParser
from penstock.router.parsers.tools.pythonic import PythonicParser
from penstock.router.parsers.tools.qwen_coder import QwenCoderParser
from penstock.router.parsers.tools.tagged_arguments import TaggedArgumentsParser
from penstock.router.parsers.tools.tool_parameters import ToolParameters

AUTO, NONE = "auto", "none"
HARMONY_TOOLS, HARMONY_REASONING = "openai", "openai_gptoss"

TOOL_PARSERS: Mapping[str, Any] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "functiongemma": FunctionGemmaParser,
    "gemma4": Gemma4Parser,
    "glm45": GlmParser,
    "glm47": GlmParser,
    "hermes": HermesParser,
    "kimi_k2": KimiParser,
    "llama3_json": LlamaJsonParser,
    "llama4_json": LlamaJsonParser,
    "llama4_pythonic": PythonicParser,
    "mistral": MistralParser,
    HARMONY_TOOLS: HarmonyParser,
    "phi4_mini_json": PhiParser,
    "pythonic": PythonicParser,
    "qwen3_coder": QwenCoderParser,
    "qwen3_xml": QwenCoderParser,
}
"""Classes of parsers of tool calls."""

THINK = Tags("<think>", "</think>")
REASONING_TAGS: Mapping[str, Tags | None] = {
    "deepseek_r1": Tags("<think>", "</think>", is_open=True),
    "deepseek_v3": THINK,
    "ernie45": THINK,
    "gemma4": Tags("<|channel>thought", "<channel|>", start_token="<|channel>"),
    "glm45": THINK,
    "mistral": Tags("[THINK]", "[/THINK]"),
    HARMONY_REASONING: None,
    "qwen3": THINK,
    "seed_oss": Tags("<seed:think>", "</seed:think>"),
}
"""Tags of each parser of reasoning, or None for the harmony format, which has no tags."""


def check_tool_parser(name: str) -> None:
    """Raise ValueError unless `name` is `auto`, `none` or the name of a parser of tool calls."""
    _check(name, TOOL_PARSERS)


def check_reasoning_parser(name: str) -> None:
    """Raise ValueError unless `name` is `auto`, `none` or the name of a parser of reasoning."""
    _check(name, REASONING_TAGS)


def _check(name: str, known: Mapping[str, object]) -> None:
    if name not in (AUTO, NONE, *known):
        raise ValueError(
            f"unknown parser {name!r}: expected one of {', '.join((AUTO, NONE, *known))}"
        )


def detect_tool_parser(template: str) -> str:
    """Return the name of the parser for the format of calls in a chat template, or `none`."""
    marks = (
        ("<|channel|>", HARMONY_TOOLS),
        ("[TOOL_CALLS]", "mistral"),
        (SECTION_BEGIN, "kimi_k2"),
        ("<start_function_call>", "functiongemma"),
        ("<|tool_call>", "gemma4"),
        ("<|tool_call|>", "phi4_mini_json"),
        ("<|tool|>", "phi4_mini_json"),
        ("functools[", "phi4_mini_json"),
        ("<|python_start|>", "llama4_pythonic"),
        ("<|python_tag|>", "llama3_json"),
        ("[func_name1(", "pythonic"),
    )
    if "tools" not in template:
        return NONE
    if CALL_BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<tool_call>" in template:
        if "<arg_key>" in template:
            return "glm45"
        return "qwen3_coder" if "<function=" in template else "hermes"
    for mark, name in marks:
        if mark in template:
            return name
    return "llama3_json" if '"parameters": dictionary of argument' in template else NONE


def detect_reasoning_parser(template: str) -> str:
    """Return the name of the parser for the format of reasoning in a chat template, or `none`."""
    marks = (
        ("<|channel|>", HARMONY_REASONING),
        ("[THINK]", "mistral"),
        ("<seed:think>", "seed_oss"),
        ("<|channel>thought", "gemma4"),
        ("<think>", "qwen3"),
        ("</think>", "qwen3"),
    )
    return next((name for mark, name in marks if mark in template), NONE)


def markers_of(name: str) -> tuple[str, ...]:
    """Return the texts of the special tokens that a parser of tool calls reads."""
    return () if name == NONE else tuple(TOOL_PARSERS[name].markers)


def call_forms(name: str, grammar: CallGrammar) -> tuple[Sequence[CallForm], ArgumentNotation]:
    """Return the forms of the calls that a parser reads, and the notation of the arguments.

    The forms are empty if a grammar cannot constrain the format of the calls.
    """
    kind: type[Reader] = TOOL_PARSERS[name]
    return kind.call_forms(grammar), kind.notation(grammar)


def new_tool_parser(name: str, tools: ToolParameters, is_strict: bool = False) -> Reader:
    """Return a new parser for one answer.

    Args:
        name: a name of `TOOL_PARSERS`.
        tools: the parameters of the request's tools.
        is_strict: whether a grammar constrains the calls of the answer (`call_forms`).
    """
    kind: type[Reader] = TOOL_PARSERS[name]
    if issubclass(kind, LlamaJsonParser):
        return kind(is_strict)
    if issubclass(kind, PythonicParser):
        return kind(tools if is_strict else None)
    return kind(tools) if issubclass(kind, TaggedArgumentsParser) else kind()
