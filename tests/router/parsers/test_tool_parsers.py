"""Parsers of tool calls: golden answers, split at every byte, character and token."""

import json
from typing import Any

import pytest

from penstock.router.parsers.parser_names import TOOL_PARSERS, new_tool_parser
from penstock.router.parsers.pieces import CALL
from penstock.router.parsers.tools.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEP,
)
from penstock.router.parsers.tools.kimi import ARGUMENT_BEGIN, SECTION_BEGIN, SECTION_END
from penstock.router.parsers.tools.kimi import CALL_BEGIN as KIMI_BEGIN
from penstock.router.parsers.tools.kimi import CALL_END as KIMI_END
from penstock.router.parsers.tools.tool_parameters import ToolParameters
from tests.support.parsed import Answer, check_splits, parse
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
ADD = '{"a": 17, "b": [25, {"c": "x}]\\"y", "d": null}]}'
CITY = '{"city": "Köln 😀 </tool_call> [TOOL_CALLS]"}'
BOTH = (("add", ADD), ("get_weather", CITY))


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(f"<tool_call>\n{call(*each)}\n</tool_call>" for each in calls)


HERMES: list[tuple[str, Answer]] = [
    ("", Answer("")),
    ("Hello,\n world.\n", Answer("Hello,\n world.\n")),
    ("a < b <tool> <tool_calm> </tool_call> <", Answer("a < b <tool> <tool_calm> </tool_call> <")),
    (hermes(*BOTH), Answer("", BOTH)),
    (f"I add.\n\n{hermes(BOTH[0])}\n", Answer("I add.", BOTH[:1])),
    (f"{hermes(BOTH[0])}\nAll is done. Yes.", Answer("All is done. Yes.", BOTH[:1])),
    (f"<tool_call>{call(*BOTH[0])}<tool_call>{call(*BOTH[1])}", Answer("", BOTH)),
    (
        '<tool_call>{"arguments": {"a": 1}, "id": [1], "name": "add"}</tool_call>',
        Answer("", [("add", '{"a": 1}')]),
    ),
    ('<tool_call>{"name": "now"}</tool_call>', Answer("", [("now", "{}")])),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', Answer("", [("now", "{}")])),
    (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Answer("", [("f", '{"a": 1}')]),
    ),
    # These texts are not calls, so they stay in the content.
    ("<tool_call>nothing</tool_call>", Answer("<tool_call>nothing</tool_call>")),
    ('<tool_call>{"a": 1}</tool_call>', Answer('<tool_call>{"a": 1}</tool_call>')),
    ('<tool_call>{"name": 5, "arguments": {}}', Answer('<tool_call>{"name": 5, "arguments": {}}')),
    ('<tool_call>{"name": }', Answer('<tool_call>{"name": }')),
    # Cases: answers that end too early.
    ("x <tool_call>", Answer("x <tool_call>")),
    ('<tool_call>{"name": "add", ', Answer('<tool_call>{"name": "add", ')),
    ('<tool_call>{"name": "add", "arguments": {"a', Answer("", [("add", '{"a')])),
    (f"<tool_call>{call(*BOTH[0])}</tool_", Answer("", BOTH[:1])),
]


def llama(*calls: tuple[str, str]) -> str:
    return "; ".join(call(*each, key="parameters") for each in calls)


LLAMA: list[tuple[str, Answer]] = [
    ("Hello {name}.", Answer("Hello {name}.")),
    (llama(*BOTH), Answer("", BOTH)),
    (f"\n<|python_tag|>{llama(*BOTH)}", Answer("", BOTH)),
    (f"I add: <|python_tag|>{llama(BOTH[0])}", Answer("I add:", BOTH[:1])),
    (
        '{"type": "function", "name": "f", "parameters": {"x": "1"}}',
        Answer("", [("f", '{"x": "1"}')]),
    ),
    # Cases: JSON answers that are not calls.
    ('{"name": "Ada", "born": 1815}', Answer('{"name": "Ada", "born": 1815}')),
    (' {"name": "Ada"}', Answer(' {"name": "Ada"}')),
    ("{not JSON} {", Answer("{not JSON} {")),
    ('<|python_tag|>print("x")', Answer('print("x")')),
    ("<|python", Answer("<|python")),
    ('{"name": "add"', Answer('{"name": "add"')),
]

PYTHONIC: list[tuple[str, Answer]] = [
    ("Hello [1] world", Answer("Hello [1] world")),
    ("[1, 2]", Answer("[1, 2]")),
    ("[link](http://x)", Answer("[link](http://x)")),
    (
        "[add(a=17, b=[25, {'c': \"x)]\", 'd': None}]), now( ), f(x = True,y=-1.5)]",
        Answer(
            "",
            [
                ("add", '{"a": 17, "b": [25, {"c": "x)]", "d": null}]}'),
                ("now", "{}"),
                ("f", '{"x": true, "y": -1.5}'),
            ],
        ),
    ),
    (
        "<|python_start|>[get_weather(city='Köln 😀 \\'s, b=1')]<|python_end|>",
        Answer("", [("get_weather", '{"city": "Köln 😀 \'s, b=1"}')]),
    ),
    ("[f(a=true, b=word, c=)]", Answer("", [("f", '{"a": true, "b": "word", "c": ""}')])),
    ("\n[a.b(x=1)]\nDone.", Answer("Done.", [("a.b", '{"x": 1}')])),
    ("[see(x)]", Answer("[see(x)]")),
    ("[see(", Answer("[see(")),
    (f"[{'f' * 300}(a=1)]", Answer(f"[{'f' * 300}(a=1)]")),
    ("[f(a=1, b", Answer("", [("f", '{"a": 1')])),
    ("<|python_start|>print(1)<|python_end|>", Answer("print(1)")),
]


def listed(*calls: tuple[str, str]) -> str:
    return f"[{', '.join(call(*each) for each in calls)}]"


MISTRAL: list[tuple[str, Answer]] = [
    ("Hello [TOOLS] [", Answer("Hello [TOOLS] [")),
    (f"[TOOL_CALLS]{listed(*BOTH)}", Answer("", BOTH)),
    (f"I add. [TOOL_CALLS] {listed(BOTH[0])}", Answer("I add.", BOTH[:1])),
    (f"[TOOL_CALLS]add{ADD}[TOOL_CALLS]get_weather{CITY}", Answer("", BOTH)),
    (f"[TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]get_weather[ARGS] {CITY}", Answer("", BOTH)),
    (f"[TOOL_CALLS]add[CALL_ID]123abcdef[ARGS]{ADD}", Answer("", BOTH[:1])),
    ("[TOOL_CALLS]", Answer("[TOOL_CALLS]")),
    ("[TOOL_CALLS]add", Answer("[TOOL_CALLS]add")),
    ("[TOOL_CALLS][]", Answer("[TOOL_CALLS][]")),
    ("[TOOL_CALLS][1]", Answer("[TOOL_CALLS][1]")),
    ('[TOOL_CALLS][{"name": "add", ', Answer('[TOOL_CALLS][{"name": "add", ')),
    ('[TOOL_CALLS]add{"a": ', Answer("", [("add", '{"a": ')])),
]


def deepseek_v3(*calls: tuple[str, str]) -> str:
    texts = [
        f"{CALL_BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"
        for name, arguments in calls
    ]
    return CALLS_BEGIN + "\n".join(texts) + CALLS_END


def deepseek_v31(*calls: tuple[str, str]) -> str:
    texts = [f"{CALL_BEGIN}{name}{SEP}{arguments}{CALL_END}" for name, arguments in calls]
    return CALLS_BEGIN + "".join(texts) + CALLS_END


DEEPSEEK_V3: list[tuple[str, Answer]] = [
    ("Hello <", Answer("Hello <")),
    (deepseek_v3(*BOTH), Answer("", BOTH)),
    (f"I add.\n{deepseek_v3(BOTH[0])}", Answer("I add.", BOTH[:1])),
    (f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}add", Answer("add")),
    (deepseek_v3(("now", ""), BOTH[0]), Answer("", [("now", "{}"), BOTH[0]])),
]
DEEPSEEK_V31: list[tuple[str, Answer]] = [
    ("Hello <", Answer("Hello <")),
    (deepseek_v31(*BOTH), Answer("", BOTH)),
    (f"I add.\n{deepseek_v31(BOTH[0])}", Answer("I add.", BOTH[:1])),
    (f"{CALLS_BEGIN}{CALL_BEGIN}add", Answer("add")),
    (f"{CALLS_BEGIN}{CALL_BEGIN}now{SEP}{CALL_END}{CALLS_END}", Answer("", [("now", "{}")])),
]


def kimi(*calls: tuple[str, str], first: int = 0) -> str:
    texts = [
        f"{KIMI_BEGIN}functions.{name}:{index}{ARGUMENT_BEGIN}{arguments}{KIMI_END}"
        for index, (name, arguments) in enumerate(calls, first)
    ]
    return SECTION_BEGIN + "".join(texts) + SECTION_END


KIMI: list[tuple[str, Answer]] = [
    ("Hello <|tool", Answer("Hello <|tool")),
    (kimi(*BOTH), Answer("", BOTH)),
    (f"I add.\n{kimi(BOTH[0], first=12)}\nDone.", Answer("I add.Done.", BOTH[:1])),
    (kimi(("a.b", "{}")).replace("functions.", " "), Answer("", [("a.b", "{}")])),
    (kimi(("now", "")), Answer("", [("now", "{}")])),
    (f"{SECTION_BEGIN}{KIMI_BEGIN}functions.add:0", Answer("functions.add:0")),
    (kimi(("add", '{"a": ')).partition(KIMI_END)[0], Answer("", [("add", '{"a": ')])),
]

PHI: list[tuple[str, Answer]] = [
    ("Hello functools <|tool", Answer("Hello functools <|tool")),
    (f"<|tool_call|>{listed(*BOTH)}<|/tool_call|>", Answer("", BOTH)),
    (f"functools{listed(*BOTH)}", Answer("", BOTH)),
    ("functools[partial]", Answer("functools[partial]")),
    ("<|tool_call|>x", Answer("<|tool_call|>x")),
]


def gemma(opening: str, closing: str, quote: str) -> list[tuple[str, Answer]]:
    def quoted(text: str) -> str:
        return f"{quote}{text}{quote}"

    arguments = (
        f"{{a:17, b:[25,{{c:{quoted('x}],:')},d:null}}],e:-1.5e3,f:true,g:12:30,{quoted('h')}:[]}}"
    )
    found = {
        "a": 17,
        "b": [25, {"c": "x}],:", "d": None}],
        "e": -1500.0,
        "f": True,
        "g": "12:30",
        "h": [],
    }
    begun = f"{opening}call:f{{x:{quote}ab"
    return [
        ("Hello <", Answer("Hello <")),
        (
            f"{opening}call:add{arguments}{closing}{opening}call:now{{}}{closing}",
            Answer("", [("add", json.dumps(found)), ("now", "{}")]),
        ),
        (
            f"I see.\n{opening}call:f{{x:{quoted('Köln 😀 ' + chr(34))}}}{closing}\n",
            Answer("I see.", [("f", '{"x": "Köln 😀 \\""}')]),
        ),
        (f"{opening}nothing{closing}", Answer(f"{opening}nothing{closing}")),
        (f"{opening}call:f", Answer(f"{opening}call:f")),
        (begun, Answer("", [("f", '{"x": "ab')])),
    ]


CASES: dict[str, list[tuple[str, Answer]]] = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI,
    "phi4_mini_json": PHI,
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [(name, text, expected) for name, cases in CASES.items() for text, expected in cases],
)
def test_answer_is_the_same_in_every_split(name: str, text: str, expected: Answer) -> None:
    make: Any = TOOL_PARSERS[name]
    found = check_splits(make, text, TOKENIZER)
    if name in ("functiongemma", "gemma4") and len(expected.calls) == 2:
        names = [name for name, _ in found.calls]
        values = [json.loads(arguments) for _, arguments in found.calls]
        assert list(zip(names, values, strict=True)) == [
            (name, json.loads(arguments)) for name, arguments in expected.calls
        ]
        return
    assert found == expected


def test_calls_of_kimi_have_the_ids_that_the_model_gave_them() -> None:
    texts = ["functions.f:3", "f:4", "functions.f:3", "functions.g", "a:b"]
    calls = [f"{KIMI_BEGIN}{text}{ARGUMENT_BEGIN}{{}}{KIMI_END}" for text in texts]
    make: Any = TOOL_PARSERS["kimi_k2"]
    found = parse(make(), [SECTION_BEGIN + "".join(calls) + SECTION_END])
    pairs = [(piece.text, piece.call_id) for piece in found if piece.kind == CALL]
    # The third id is already used by another call. The last two texts have no index.
    assert pairs == [("f", "functions.f:3"), ("f", "f:4"), ("f", ""), ("g", ""), ("a:b", "")]


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ('\n{"name": "add", "parameters": {"a": 1}}', True),
        ('{ "name": "add", "parameters": {"a": "x"}}', False),
        ('{"type": "function", "name": "add", "parameters": {"a": "x"}}', False),
        (" " * 9 + '{"name": "add", "parameters": {"a": "x"}}', False),
        ('{"na', False),
        ('{ <|python_tag|>{"name": "add", "parameters": {"a": 1}}', True),
    ],
)
@pytest.mark.parametrize("step", [1, 100])
def test_strict_llama_calls_are_those_that_the_grammar_constrains(
    text: str, is_call: bool, step: int
) -> None:
    parser = new_tool_parser("llama3_json", ToolParameters(), is_strict=True)
    pieces = [
        piece for at in range(0, len(text), step) for piece in parser.feed(text[at : at + step])
    ]
    pieces += parser.finish()
    assert any(piece.kind == CALL for piece in pieces) == is_call
    if not is_call:
        assert "".join(piece.text for piece in pieces) == text


@pytest.mark.parametrize("key", ["name", "arguments", "other"])
def test_deeply_nested_value_in_a_call_is_read(key: str) -> None:
    nested = "[" * 100_000 + "]" * 100_000
    members = {"name": '"add"', "arguments": "{}", "other": "1", key: nested}
    text = ", ".join(f'"{name}": {value}' for name, value in members.items())
    text = f"<tool_call>{{{text}}}</tool_call>"
    pieces = parse(new_tool_parser("hermes", ToolParameters()), [text])
    found = "".join(piece.text for piece in pieces)
    assert found == {"name": text, "arguments": f"add{nested}", "other": "add{}"}[key]
