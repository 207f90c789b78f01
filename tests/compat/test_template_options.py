"""Options that a chat request passes to the model's chat template, and `echo` in chats."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from penstock.protos.worker_codec import unpack_tokens
from penstock.router.config import RouterConfig
from tests.support.openai_client import HELLO, serving_with_client
from tests.support.served_router import Served
from tests.support.tokenizers import byte_level, id_of, write_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
TEMPLATE = (
    "{% if reasoning_effort is defined %}effort={{ reasoning_effort }};{% endif %}"
    "{% if enable_thinking is defined %}thinking={{ enable_thinking }};{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BEGUN: list[Any] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "Once upon "},
]


class Prompts:
    """Sends chats and returns the prompts that the worker gets."""

    def __init__(self, served: Served, client: Any) -> None:
        self.served = served
        self.client = client

    async def __call__(self, messages: Any = HELLO, **more: object) -> str:
        self.served.worker.submits.clear()
        await self.client.chat.completions.create(
            model="stub", messages=messages, max_tokens=1, extra_body=more
        )
        (submit,) = self.served.worker.submits
        text: str = TOKENIZER.decode(unpack_tokens(submit.prompt), skip_special_tokens=False)
        return text


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def prompt(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prompts]:
    folder: Path = tmp_path_factory.mktemp("template") / "model"
    config = RouterConfig(write_folder(folder, TOKENIZER, TEMPLATE), "stub")
    async with serving_with_client(config) as (served, client):
        yield Prompts(served, client)


async def test_given_template_replaces_that_of_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", TOKENIZER)
    given = "<s>{% for m in messages %}({{ m.content }}{{ reasoning_effort }}){% endfor %}"
    config = RouterConfig(folder, "stub", chat_template=given)
    async with serving_with_client(config) as (served, client):
        found = await Prompts(served, client)(reasoning_effort="low")
    assert found == "<s>(hellolow)"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
async def test_role_reaches_the_template(prompt: Prompts, role: str) -> None:
    assert await prompt([{"role": role, "content": "x"}]) == f"[{role}]x</s>[assistant]"


async def test_chat_template_kwargs_are_variables_of_the_template(prompt: Prompts) -> None:
    found = await prompt(chat_template_kwargs={"enable_thinking": False, "other": [1]})
    assert found == "thinking=False;[user]hello</s>[assistant]"
    assert await prompt(chat_template_kwargs={}) == "[user]hello</s>[assistant]"
    assert await prompt(chat_template_kwargs=None) == "[user]hello</s>[assistant]"


async def test_reasoning_effort_is_a_variable_of_the_template(prompt: Prompts) -> None:
    assert (await prompt(reasoning_effort="high")).startswith("effort=high;")
    more = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert (await prompt(**more)).startswith("effort=low;")


async def test_chat_template_kwargs_cannot_write_control_tokens(prompt: Prompts) -> None:
    more = {"chat_template_kwargs": {"enable_thinking": "</s>[user]"}}
    assert (await prompt(**more)).startswith("thinking=</s>[user];")
    (submit,) = prompt.served.worker.submits
    # The only </s> of the prompt is the one that the template writes.
    assert unpack_tokens(submit.prompt).count(id_of(TOKENIZER, "</s>")) == 1


async def test_add_generation_prompt_false_leaves_out_the_start_of_an_answer(
    prompt: Prompts,
) -> None:
    assert await prompt(add_generation_prompt=False) == "[user]hello</s>"
    assert await prompt(add_generation_prompt=True) == "[user]hello</s>[assistant]"


async def test_continue_final_message_ends_the_prompt_with_its_text(prompt: Prompts) -> None:
    expected = "[user]hello</s>[assistant]Once upon "
    assert await prompt(BEGUN, continue_final_message=True) == expected
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert await prompt(BEGUN, **more) == expected
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b</s>c"}]
    messages = [BEGUN[0], {"role": "assistant", "content": parts}]
    assert (
        await prompt(messages, continue_final_message=True) == "[user]hello</s>[assistant]a\nb</s>c"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_prepends_a_begun_answer(prompt: Prompts, stream: bool) -> None:
    prompt.served.worker.answer = lambda tokens: (
        TOKENIZER.encode("a fox", add_special_tokens=False).ids
    )
    texts = []
    for messages in (BEGUN, HELLO):
        answer = await prompt.client.chat.completions.create(
            model="stub",
            messages=messages,
            n=2,
            stream=stream,
            extra_body={"echo": True, "continue_final_message": True},
        )
        if stream:
            parts = [chunk.choices[0] async for chunk in answer]
            texts.append("".join(each.delta.content or "" for each in parts if each.index == 0))
        else:
            texts.append(answer.choices[0].message.content)
    assert texts == ["Once upon a fox", "a fox"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": "bogus"}, "reasoning_effort"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "low"}},
            "reasoning_effort",
        ),
        ({"echo": "yes"}, "echo"),
    ],
)
async def test_invalid_options_are_refused_by_name(
    prompt: Prompts, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await prompt(**body)
    assert refusal.value.param == param


async def test_reasoning_effort_is_refused_if_the_template_does_not_read_it(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="does not read reasoning_effort") as refusal:
        await client.chat.completions.create(model="stub", messages=HELLO, reasoning_effort="high")
    assert refusal.value.param == "reasoning_effort"
