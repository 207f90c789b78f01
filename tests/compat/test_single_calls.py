"""`parallel_tool_calls: false`: at most one call, in each API and format (official clients)."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.common.grammar.matcher import GrammarVocabulary
from penstock.common.structured_outputs import StructuredOutputs
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.router.config import RouterConfig
from tests.compat.test_tool_calls import Model, found
from tests.support import anthropic_client
from tests.support.openai_client import HELLO, serving_with_client
from tests.support.tokenizers import byte_level, write_folder
from tests.support.two_calls import FIRST, FUNCTIONS, SECOND, WRITERS

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}[assistant]"
)
FREE = [{**each, "strict": False} for each in FUNCTIONS]
LOOSE = [{"type": "function", "function": each} for each in FREE]
STRICT = [{"type": "function", "function": each} for each in FUNCTIONS]


@pytest.mark.parametrize("name", WRITERS)
async def test_one_call_of_each_format_is_returned(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model", TOKENIZER, TEMPLATE)
    config = RouterConfig(folder, "stub", tool_call_parser=name)
    async with serving_with_client(config) as (served, client):
        model = Model(served, client)
        for write in WRITERS[name]:
            for stream in (False, True):
                body = {"tools": LOOSE, "parallel_tool_calls": False}
                (choice,) = await model(write(FIRST, SECOND), stream, **body)
                content, _, calls, finish = found(choice)
                assert (content, finish) == (None, "tool_calls")
                assert [(called, json.loads(values)) for called, values in calls] == [FIRST]
                (choice,) = await model(write(FIRST, SECOND), stream, tools=LOOSE)
                assert [called for called, _ in found(choice)[2]] == ["add", "mul"]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    folder = write_folder(tmp_path_factory.mktemp("single") / "model", TOKENIZER, TEMPLATE)
    async with serving_with_client(RouterConfig(folder, "stub")) as (served, client):
        yield Model(served, client)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    folder = write_folder(tmp_path_factory.mktemp("words") / "model", TOKENIZER, TEMPLATE)
    tokenizer = ModelTokenizer(folder)
    return GrammarVocabulary(tokenizer, tokenizer.vocab_size, [2])


async def ask_chat(model: Model, **body: Any) -> None:
    await model("42", tools=STRICT, **body)


async def ask_responses(model: Model, **body: Any) -> None:
    tools = [{"type": "function", **each} for each in FUNCTIONS]
    await model.client.responses.create(model="stub", input="hello", tools=tools, **body)


async def ask_messages(model: Model, parallel_tool_calls: bool | None = None) -> None:
    tools = [
        {"name": each["name"], "input_schema": each["parameters"], "strict": True}
        for each in FUNCTIONS
    ]
    choice: dict[str, Any] = {"type": "auto"}
    if parallel_tool_calls is not None:
        choice["disable_parallel_tool_use"] = not parallel_tool_calls
    async with anthropic_client.connect(model.served) as client:
        call: dict[str, Any] = {"messages": HELLO, "tools": tools, "tool_choice": choice}
        await client.messages.create(model="stub", max_tokens=100, **call)


@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
@pytest.mark.parametrize("is_parallel", [None, True, False])
async def test_grammar_of_strict_calls_allows_one_call(
    model: Model, vocabulary: GrammarVocabulary, ask: Any, is_parallel: bool | None
) -> None:
    await ask(model, **({} if is_parallel is None else {"parallel_tool_calls": is_parallel}))
    wanted = model.served.worker.submits[-1].params.structured_outputs
    grammar = vocabulary.compile(StructuredOutputs(wanted.kind, wanted.text))
    (write,) = WRITERS["hermes"]

    def accepts(text: str) -> bool:
        return grammar.matcher().advance(TOKENIZER.encode(text, add_special_tokens=False).ids)

    assert accepts(f"I add.\n{write(FIRST)}")
    assert accepts(write(FIRST, SECOND)) is (is_parallel is not False)
    assert accepts(f"{write(FIRST)} Done.") is (is_parallel is not False)
