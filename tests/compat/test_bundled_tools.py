"""The bundled model calls tools, and answers from their results (openai's client)."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.router.config import RouterConfig
from penstock.workers.config import WorkerConfig
from penstock.workers.service.grpc_service import serve_worker
from tests.support.served_router import Served, serving, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOLDER = Path(__file__).parents[2] / "penstock" / "models" / "demo"


def tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


CALCULATOR = tool("calculator", "Evaluates an arithmetic expression.", "expression")
LOOKUP = tool("lookup", "Returns the entry of a key.", "key")
TOOLS = [CALCULATOR, LOOKUP]
QUESTIONS = [
    ("What is 4821 * 377?", "calculator", {"expression": "4821 * 377"}, "1817517"),
    ("What is the entry of K7X2?", "lookup", {"key": "K7X2"}, "silver lantern"),
]
ANSWERS = ["4821 * 377 = 1817517", 'The entry of "K7X2" is silver lantern.']


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_served() -> AsyncIterator[Served]:
    worker = await serve_worker(WorkerConfig("w0", FOLDER, kv_cache_mib=8))
    async with serving(RouterConfig(FOLDER, "demo")) as served:
        await served.router.frontend.set_workers({"w0": worker.address})
        await until(lambda: not served.router.frontend.why_not_ready())
        yield served
    await worker.stop()


@pytest.fixture
def served(module_served: Served) -> Served:
    return module_served


async def ask(client: Any, messages: list[Any], **fields: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_completion_tokens": 120, **fields}
    answer = await client.chat.completions.create(messages=messages, **given)
    return answer.choices[0]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    calls = choice.message.tool_calls or ()
    return [(each.function.name, json.loads(each.function.arguments)) for each in calls]


@pytest.mark.parametrize(
    ("question", "answer"), list(zip(QUESTIONS, ANSWERS, strict=True)), ids=["calculator", "lookup"]
)
async def test_call_and_answer_from_its_result(client: Any, question: Any, answer: str) -> None:
    text, name, arguments, result = question
    messages = user(text)
    choice = await ask(client, messages, tools=TOOLS)
    assert (calls_of(choice), choice.finish_reason) == ([(name, arguments)], "tool_calls")
    (call,) = choice.message.tool_calls
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    choice = await ask(client, messages, tools=TOOLS)
    assert (choice.message.content, choice.finish_reason) == (answer, "stop")
    assert not choice.message.tool_calls


@pytest.mark.parametrize("question", QUESTIONS, ids=["calculator", "lookup"])
async def test_streamed_call(client: Any, question: Any) -> None:
    text, name, arguments, _ = question
    async with client.chat.completions.stream(
        model="demo", messages=user(text), tools=TOOLS, temperature=0
    ) as stream:
        final = await stream.get_final_completion()
    assert calls_of(final.choices[0]) == [(name, arguments)]


@pytest.mark.parametrize("question", QUESTIONS, ids=["calculator", "lookup"])
async def test_required_call_and_named_call(client: Any, question: Any) -> None:
    text, name, arguments, _ = question
    named = {"type": "function", "function": {"name": name}}
    for tool_choice in ("required", named):
        choice = await ask(client, user(text), tools=TOOLS, tool_choice=tool_choice)
        assert calls_of(choice) == [(name, arguments)]


async def test_no_call_if_no_tool_fits(client: Any) -> None:
    text = "Which day comes two days after Monday?"
    for tools in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        choice = await ask(client, user(text), **tools)
        assert choice.message.content == "Two days after Monday comes Wednesday."
        assert not choice.message.tool_calls


@pytest.mark.parametrize("question", QUESTIONS, ids=["calculator", "lookup"])
async def test_without_its_tool_a_question_is_not_answered(client: Any, question: Any) -> None:
    text, name, *_ = question
    others = [each for each in TOOLS if each["function"]["name"] != name]
    for tools in ({"tools": others}, {}):
        choice = await ask(client, user(text), **tools)
        assert "I do not know that" in choice.message.content
        assert not choice.message.tool_calls
