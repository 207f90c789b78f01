"""Submissions with constraints over the worker's service: refusals, order, logs and the cache."""

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.common.grammar.cache import GrammarCache
from penstock.common.grammar.matcher import CompiledGrammar
from penstock.common.structured_outputs import StructuredOutputs
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.protos import worker_pb2 as wire
from penstock.protos.worker_codec import pack_tokens
from penstock.workers.config import WorkerConfig
from penstock.workers.service.grpc_service import RunningWorker, serve_worker
from tests.support.attached_router import AttachedRouter, greedy
from tests.support.tiny import tiny_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOLDER = Path(__file__).parents[3] / "penstock" / "models" / "demo-small"
TOKENIZER = ModelTokenizer(FOLDER)
PROMPT = TOKENIZER.encode("Once upon a time")
SCHEMA = json.dumps({"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 4})


def form(kind: str, text: str) -> wire.StructuredOutputs:
    return wire.StructuredOutputs(kind=kind, text=text)


def constrained(max_tokens: int, wanted: wire.StructuredOutputs) -> wire.SamplingParams:
    return greedy(max_tokens, ignore_eos=False, structured_outputs=wanted)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[RunningWorker]:
    running = await serve_worker(WorkerConfig("w0", FOLDER, kv_cache_mib=8, max_queued=16))
    yield running
    await running.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def router(worker: RunningWorker) -> AsyncIterator[AttachedRouter]:
    attached = await AttachedRouter(worker.address, None).open()
    yield attached
    await attached.close()


def rejections(router: AttachedRouter) -> list[tuple[int, bool, str]]:
    found = [each.rejected for each in router.received if each.HasField("rejected")]
    return [(each.request, each.never, each.reason) for each in found]


async def test_answer_has_its_form_and_continues_from_its_log(router: AttachedRouter) -> None:
    params = constrained(40, form("json", SCHEMA))
    await router.submit(1, PROMPT, params)
    whole = await router.answer(1)
    assert set(json.loads(TOKENIZER.token_bytes.decode(whole))) <= {"red", "blue"}
    log = [wire.ChoiceLog(choice=0, tokens=pack_tokens(whole[:2]))]
    await router.submit(2, PROMPT, params, log=log)
    assert await router.answer(2) == whole[2:]


async def test_commands_for_a_sequence_reach_the_engine_after_it(router: AttachedRouter) -> None:
    params = constrained(200, form("regex", "[a-z ]{5000}"))
    await router.submit(1, PROMPT, params)
    # `yield` is a keyword of Python, so pass this field through a dict.
    command: dict[str, Any] = {"yield": wire.Yield(request=1, attempt=1)}
    await router.send(**command)
    await router.until(lambda: any(each.HasField("yielded") for each in router.received))
    await router.drop(1)


@pytest.mark.parametrize(
    ("kind", "text", "log", "words"),
    [
        ("json", '{"not": {}}', [], "at /not: "),
        ("xml", "x", [], "kind 'xml'"),
        ("regex", "(a", [], "unclosed group"),
        ("regex", "[0-9]+", TOKENIZER.encode("x"), "grammar does not allow the 1 tokens"),
    ],
)
async def test_form_that_cannot_be_followed_is_rejected_for_ever(
    router: AttachedRouter, kind: str, text: str, log: list[int], words: str
) -> None:
    params = constrained(20, form(kind, text))
    entries = [wire.ChoiceLog(choice=0, tokens=pack_tokens(log))] if log else []
    await router.submit(1, PROMPT, params, log=entries)
    await router.until(lambda: rejections(router))
    ((request, never, reason),) = rejections(router)
    assert (request, never) == (1, True)
    assert words in reason


async def test_dropped_sequence_is_not_submitted_when_its_grammar_is_ready(
    router: AttachedRouter,
) -> None:
    params = constrained(20, form("regex", "[0-9]{3}x"))
    await router.submit(1, PROMPT, params)
    await router.drop(1)
    await router.submit(2, PROMPT, params)
    assert TOKENIZER.token_bytes.decode(await router.answer(2)).endswith("x")
    assert not router.answers[1, 1]


async def test_grammars_of_dropped_sequences_are_not_compiled(
    router: AttachedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_grammar, may_compile = GrammarCache.compile, threading.Event()
    compiled: list[str] = []

    def wait_and_compile(cache: GrammarCache, wanted: StructuredOutputs) -> CompiledGrammar:
        assert may_compile.wait(60)
        compiled.append(wanted.text)
        return compile_grammar(cache, wanted)

    monkeypatch.setattr(GrammarCache, "compile", wait_and_compile)
    forms = [f"[0-9]{{{request}}}z" for request in range(1, 5)]
    for request, text in enumerate(forms, 1):
        await router.submit(request, PROMPT, constrained(20, form("regex", text)))
    await router.until(lambda: router.load.awaiting_grammar == 4)
    for request in (2, 3):
        await router.drop(request)
    await router.until(lambda: router.load.awaiting_grammar == 2)
    may_compile.set()
    await router.answer(4)
    assert compiled == [forms[0], forms[3]]


async def test_load_counts_the_sequences_that_wait_for_their_grammars(
    router: AttachedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_grammar, may_compile = GrammarCache.compile, threading.Event()

    def wait_and_compile(cache: GrammarCache, wanted: StructuredOutputs) -> CompiledGrammar:
        assert may_compile.wait(60)
        return compile_grammar(cache, wanted)

    monkeypatch.setattr(GrammarCache, "compile", wait_and_compile)
    for request in (1, 2):
        await router.submit(request, PROMPT, constrained(20, form("regex", f"[0-9]{{{request}}}y")))
    await router.until(lambda: router.load.awaiting_grammar == 2)
    await router.drop(2)
    await router.until(lambda: router.load.awaiting_grammar == 1)
    assert router.load.queued == router.load.running == 0
    may_compile.set()
    await router.answer(1)
    await router.until(lambda: router.load.awaiting_grammar == 0)


async def test_model_without_a_tokenizer_rejects_forms_by_name(tmp_path: Path) -> None:
    bare = await serve_worker(WorkerConfig("w1", tiny_checkpoint(tmp_path), kv_cache_mib=1))
    attached = await AttachedRouter(bare.address, None).open()
    params = constrained(20, form("regex", "a"))
    await attached.submit(1, [5, 6], params)
    await attached.until(lambda: rejections(attached))
    assert "tokenizer.json is missing" in rejections(attached)[0][2]
    await attached.close()
    await bare.stop()
