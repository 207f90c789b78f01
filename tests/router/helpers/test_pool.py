"""A helper process ends at its limits; other jobs and the other helper process continue."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import pytest_asyncio

from penstock.common.text.chat_source import ChatSource, TemplateOptions
from penstock.common.text.control_tokens import Segment
from penstock.router.config import HelperLimits
from penstock.router.errors import Code, ServingError
from penstock.router.helpers.fork_server import ForkServer, helper_environment
from penstock.router.helpers.pool import HelperPool
from penstock.router.helpers.settings import HelperSettings, decode_settings, encode_settings
from penstock.router.requests.chat import Chat, chat_of
from penstock.router.requests.chat_rendering import render_chat
from tests.support.served_router import FORK_SERVER, until
from tests.support.serving import is_alive

TEMPLATE = (
    "{% if spin %}{% for i in range(99999) %}{% for j in range(99999) %}{{ i * j }}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% if size %}{% set big = 'a' * size %}{{ big | length }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}</s>{% endfor %}"
)
LIMITS = HelperLimits(cpu_seconds=0.3)
LONG = 1 << 20
QUICK = TemplateOptions(variables={"x": 1})
SPIN = TemplateOptions(variables={"spin": True})


def pool_of(
    template: str | None = TEMPLATE, fork_server: ForkServer = FORK_SERVER, **limits: Any
) -> HelperPool:
    chat = None if template is None else ChatSource(template, {}, ("</s>",))
    return HelperPool(fork_server, HelperSettings(chat, replace(LIMITS, **limits)))


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[HelperPool]:
    pool = pool_of()
    await pool.start()
    yield pool
    pool.close()


async def chat() -> Chat:
    return await chat_of([{"role": "user", "content": "hé</s>"}])


async def render(
    pool: HelperPool, options: TemplateOptions = QUICK, tenant: str = "t", most: int = LONG
) -> str:
    segments = await render_chat(pool, await chat(), options, most, tenant)
    return "".join(segment.text for segment in segments)


def helpers_of(fork_server: ForkServer) -> list[psutil.Process]:
    """Return the helper processes that are alive."""
    process = fork_server._process
    assert process is not None
    return [child for child in psutil.Process(process.pid).children() if is_alive(child)]


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process in user mode; 0 if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cpu_times().user
    return 0.0


async def test_chat_is_rendered_and_its_control_tokens_are_marked(pool: HelperPool) -> None:
    segments = await render_chat(pool, await chat(), QUICK, LONG, "t")
    assert segments == [Segment("[user]hé</s>", True), Segment("</s>", False)]
    assert pool.template_variables >= {"spin", "size", "messages"}


async def test_template_that_never_ends_is_refused_and_the_next_chat_is_rendered(
    pool: HelperPool,
) -> None:
    with pytest.raises(ServingError, match=r"chat template needs more than 0\.3 s") as at:
        await render(pool, SPIN)
    assert (at.value.code, at.value.param) == (Code.INVALID, "messages")
    assert "\n" not in at.value.message
    assert await render(pool) == "[user]hé</s></s>"


async def test_template_that_needs_gigabytes_is_refused_and_the_next_chat_is_rendered(
    pool: HelperPool,
) -> None:
    options = TemplateOptions(variables={"size": 4 << 30})
    with pytest.raises(ServingError, match="chat template needs more than 256 MiB") as at:
        await render(pool, options)
    assert (at.value.code, at.value.param) == (Code.INVALID, "messages")
    assert await render(pool) == "[user]hé</s></s>"


async def test_template_that_makes_too_long_a_prompt_is_refused(pool: HelperPool) -> None:
    with pytest.raises(ServingError, match=r"makes 16 characters .* at most 15 can fit") as at:
        await render(pool, most=15)
    assert at.value.reason == "context_length_exceeded"
    assert await render(pool, most=16) == "[user]hé</s></s>"


async def test_other_chats_are_rendered_while_a_template_runs(pool: HelperPool) -> None:
    spinning = asyncio.create_task(render(pool, SPIN, "greedy"))
    behind = [asyncio.create_task(render(pool, tenant="greedy")) for _ in range(3)]
    assert await render(pool, tenant="other") == "[user]hé</s></s>"
    assert not spinning.done()  # the other chat was rendered while this job still runs
    assert await asyncio.gather(*behind) == ["[user]hé</s></s>"] * 3
    with pytest.raises(ServingError, match="processor time"):
        await spinning


async def test_chats_of_a_killed_process_are_rendered_by_another() -> None:
    fork_server = ForkServer()
    pool = pool_of(fork_server=fork_server, num_processes=1, cpu_seconds=20.0)
    await pool.start()
    (process,) = helpers_of(fork_server)
    process.suspend()
    waiting = [asyncio.create_task(render(pool)) for _ in range(5)]
    await asyncio.sleep(0)
    process.kill()
    assert await asyncio.gather(*waiting) == ["[user]hé</s></s>"] * 5
    assert [each.pid for each in helpers_of(fork_server)] != [process.pid]
    pool.close()
    fork_server.close()


async def test_large_chats_are_sent_again_if_the_process_is_killed_while_it_receives_one() -> None:
    fork_server = ForkServer()
    pool = pool_of(fork_server=fork_server, num_processes=1, cpu_seconds=20.0)
    await pool.start()
    (process,) = helpers_of(fork_server)
    process.suspend()
    texts = [letter * LONG for letter in "ab"]
    chats = [await chat_of([{"role": "user", "content": text}]) for text in texts]
    waiting = [asyncio.create_task(render_chat(pool, each, QUICK, 2 * LONG, "t")) for each in chats]
    await until(lambda: pool.num_waiting == 1)  # the socket does not accept all of the first chat
    process.kill()
    found = ["".join(segment.text for segment in each) for each in await asyncio.gather(*waiting)]
    assert found == [f"[user]{text}</s>" for text in texts]
    pool.close()
    fork_server.close()


async def test_chat_whose_process_is_killed_twice_is_refused() -> None:
    fork_server = ForkServer()
    pool = pool_of(fork_server=fork_server, num_processes=1, cpu_seconds=60.0)
    await pool.start()
    spinning = asyncio.create_task(render(pool, SPIN))
    killed: set[int] = set()

    def busy() -> list[psutil.Process]:
        processes = [each for each in helpers_of(fork_server) if each.pid not in killed]
        return [each for each in processes if cpu_seconds(each) > 0.1]

    for _ in range(2):
        await until(busy)
        (process,) = busy()
        process.kill()
        killed.add(process.pid)
    with pytest.raises(ServingError) as at:
        await spinning
    assert at.value.code is Code.UNAVAILABLE
    assert await render(pool) == "[user]hé</s></s>"
    pool.close()
    fork_server.close()


async def test_killed_fork_server_and_its_processes_are_replaced() -> None:
    fork_server = ForkServer()
    pool = pool_of(fork_server=fork_server)
    await pool.start()
    old = helpers_of(fork_server)
    assert len(old) == 2
    process = fork_server._process
    assert process is not None
    process.kill()
    process.wait()
    psutil.wait_procs(old)  # helper processes end with the fork server
    assert await render(pool) == "[user]hé</s></s>"
    pool.close()
    fork_server.close()


async def test_closed_fork_server_leaves_no_process() -> None:
    fork_server = ForkServer()
    pool = pool_of(fork_server=fork_server, cpu_seconds=60.0)
    await pool.start()
    spinning = asyncio.create_task(render(pool, SPIN))
    await until(lambda: sum(map(cpu_seconds, helpers_of(fork_server))) > 0.1)
    processes = [psutil.Process(fork_server._process.pid), *helpers_of(fork_server)]  # type: ignore[union-attr]
    pool.close()
    fork_server.close()
    psutil.wait_procs(processes)
    with pytest.raises(ServingError, match="shutting down"):
        await spinning
    with pytest.raises(ServingError, match="shutting down"):
        await render(pool)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "not valid"),
        ("{{ 3 ** (3 ** 18) }}", "the model's chat template needs more than 0.3 s"),
        (None, ""),
    ],
)
async def test_template_is_compiled_in_a_helper_process(template: str | None, words: str) -> None:
    pool = pool_of(template)
    if words:
        with pytest.raises(ServingError, match=words):
            await pool.start()
        return
    await pool.start()
    with pytest.raises(ServingError, match="has no chat template"):
        await render(pool)
    pool.close()


async def test_process_that_cannot_start_is_an_error_and_not_a_hang() -> None:
    fork_server = ForkServer("penstock.no_such_module")
    with pytest.raises(ServingError) as at:
        await pool_of(fork_server=fork_server).start()
    assert at.value.code is Code.UNAVAILABLE
    fork_server.close()


async def test_cancelled_job_leaves_the_line(pool: HelperPool) -> None:
    spinning = asyncio.create_task(render(pool, SPIN))
    await asyncio.sleep(0)
    large = Chat(json.dumps([{"role": "user", "content": "x" * (1 << 17)}]).encode(), 1 << 17)
    waiting = asyncio.create_task(render_chat(pool, large, QUICK, LONG, "t"))
    await until(lambda: pool.num_waiting == 1)
    waiting.cancel()
    await until(lambda: pool.num_waiting == 0)
    spinning.cancel()
    await asyncio.wait([spinning, waiting])


async def test_processes_see_no_secrets_and_write_no_core_dumps(pool: HelperPool) -> None:
    for process in helpers_of(FORK_SERVER):
        assert process.environ().keys() <= {*helper_environment(os.environ)}
        assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
        assert process.rlimit(psutil.RLIMIT_NPROC) == (0, 0)
    assert "MY_SECRET" not in helper_environment({"MY_SECRET": "x", "PATH": "/bin"})


@pytest.mark.parametrize("chat", [None, ChatSource("x", {"bos_token": "<s>"}, ("<s>", "</s>"))])
def test_settings_are_the_same_in_the_process(chat: ChatSource | None) -> None:
    settings = HelperSettings(chat, HelperLimits(cpu_seconds=0.7))
    assert decode_settings(encode_settings(settings)) == settings
