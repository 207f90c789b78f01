"""Sequences that wait for their grammar, which a thread compiles beside the engine's steps."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from penstock.common.grammar.cache import GrammarCache
from penstock.common.structured_outputs import StructuredOutputs
from penstock.workers.engine.engine import Engine
from penstock.workers.scheduling.sequence import NewSequence
from penstock.workers.service.codec import SequenceKey

EngineCommand: TypeAlias = Callable[[Engine], None]

Ready: TypeAlias = Callable[[NewSequence], None]
Refused: TypeAlias = Callable[[str], None]


class PendingGrammars:
    """Compiles the grammars of submitted sequences. Only the event loop may call the methods.

    Args:
        cache: compiles the grammars.
        most: maximum number of sequences that wait.
    """

    def __init__(self, cache: GrammarCache, most: int) -> None:
        self._cache = cache
        self._most = most
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._commands: dict[SequenceKey, list[EngineCommand]] = {}

    @property
    def is_full(self) -> bool:
        """Whether no more sequences may wait."""
        return len(self._commands) >= self._most

    def start(
        self,
        key: SequenceKey,
        new: NewSequence,
        wanted: StructuredOutputs,
        ready: Ready,
        refused: Refused,
        post: Callable[[EngineCommand], None],
    ) -> None:
        """Compile the grammar of a sequence; one of the callbacks is called, unless `cancel` is.

        Args:
            key: key of the sequence.
            new: the sequence.
            wanted: its constraint.
            ready: called with the sequence and its grammar. If the grammar is compiled already and
                the sequence has no answer yet, this happens before `start` returns.
            refused: called with the reason why no grammar can be used.
            post: gets the deferred commands, after `ready` was called.
        """
        found = self._cache.find(wanted)
        if found is not None and not _answers(new):
            ready(replace(new, grammar=found))
            return
        self._commands[key] = []
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, partial(self._compiled, new, wanted))
        done.add_done_callback(partial(self._done, key, ready, refused, post))

    def defer(self, key: SequenceKey, command: EngineCommand) -> bool:
        """Keep a command for a sequence that waits; return False if the sequence does not wait."""
        waiting = self._commands.get(key)
        if waiting is None:
            return False
        waiting.append(command)
        return True

    def cancel(self, key: SequenceKey) -> None:
        """Forget a sequence; ignore a key that does not wait."""
        self._commands.pop(key, None)

    def stop(self) -> None:
        """Compile nothing more."""
        self._commands.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, new: NewSequence, wanted: StructuredOutputs) -> NewSequence:
        grammar = self._cache.compile(wanted)
        for answer in _answers(new):
            grammar.check_answer(answer)
        return replace(new, grammar=grammar)

    def _done(
        self,
        key: SequenceKey,
        ready: Ready,
        refused: Refused,
        post: Callable[[EngineCommand], None],
        done: "asyncio.Future[NewSequence]",
    ) -> None:
        if done.cancelled():
            return
        error, commands = done.exception(), self._commands.pop(key, None)
        if commands is None:
            return
        if error is not None:
            if not isinstance(error, ValueError):
                raise error
            refused(str(error))
            return
        ready(done.result())
        for command in commands:
            post(command)


def _answers(new: NewSequence) -> list[list[int]]:
    """Return the answers so far of all choices of a sequence that are not empty."""
    logs = [new.tokens, *(sibling.tokens for sibling in new.siblings)]
    return [list(log[new.num_prompt :]) for log in logs if len(log) > new.num_prompt]
