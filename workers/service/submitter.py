"""Submits sequences to the engine after another thread has compiled their grammars."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from penstock.common.grammar.cache import GrammarCache
from penstock.common.structured_outputs import StructuredOutputs
from penstock.protos import worker_pb2 as wire
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.engine_thread import EngineThread
from penstock.workers.scheduling.sequence import NeverFits, NewSequence
from penstock.workers.service.codec import SequenceKey
from penstock.workers.service.session import Session

EngineCommand: TypeAlias = Callable[[Engine], None]


@dataclass(slots=True)
class _Compilation:
    future: asyncio.Future[NewSequence]
    # commands to post to the engine after the sequence is submitted
    commands: list[EngineCommand] = field(default_factory=list)


class Submitter:
    """Submits sequences to the engine. Only the event loop may call the methods.

    Args:
        engine: gets the sequences and the commands for them.
        grammars: compiles the grammars, on one thread.
        most: maximum number of sequences that wait for their grammars.
    """

    def __init__(self, engine: EngineThread, grammars: GrammarCache, most: int) -> None:
        self._engine = engine
        self._grammars = grammars
        self._most = most
        self._thread = ThreadPoolExecutor(1, "grammars")
        # The compilation of each sequence that waits for its grammar.
        self._waiting: dict[SequenceKey, _Compilation] = {}

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for their grammars."""
        return len(self._waiting)

    def submit(self, session: Session, key: SequenceKey, new: NewSequence) -> None:
        """Submit a sequence of `session`; reject it if the engine refuses it or the grammar fails.

        A grammar that is not in the cache is compiled first. Until then, `post` queues the commands
        for the sequence.
        """
        wanted = new.params.structured_outputs
        if wanted is None:
            self._submit(session, key, new)
            return
        found = self._grammars.find(wanted)
        if found is not None and not _answers(new):
            self._submit(session, key, replace(new, grammar=found))
        elif len(self._waiting) >= self._most:
            many = f"{len(self._waiting)} requests wait until their grammars are compiled"
            self._refuse(session, key, f"{many}, the maximum: try later", False)
        else:
            compiling = partial(self._with_grammar, new, wanted)
            done = asyncio.get_running_loop().run_in_executor(self._thread, compiling)
            self._waiting[key] = _Compilation(done)
            done.add_done_callback(partial(self._compiled, session, key))

    def post(self, key: SequenceKey, command: EngineCommand) -> None:
        """Post a command for a sequence; the engine gets it after the sequence itself."""
        if key in self._waiting:
            self._waiting[key].commands.append(command)
        else:
            self._engine.post(command)

    def cancel(self, key: SequenceKey) -> None:
        """Discard a sequence that waits for its grammar; ignore other keys.

        The grammar is not compiled, unless its compilation has begun.
        """
        compilation = self._waiting.pop(key, None)
        if compilation is not None:
            compilation.future.cancel()

    def stop(self) -> None:
        """Stop compiling grammars; discard the sequences that wait for one."""
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _with_grammar(self, new: NewSequence, wanted: StructuredOutputs) -> NewSequence:
        """Return `new` with its compiled grammar; raise ValueError if the grammar is unusable."""
        grammar = self._grammars.compile(wanted)
        for answer in _answers(new):
            grammar.check_answer(answer)
        return replace(new, grammar=grammar)

    def _compiled(
        self, session: Session, key: SequenceKey, done: "asyncio.Future[NewSequence]"
    ) -> None:
        if done.cancelled() or key not in self._waiting:
            return
        commands = self._waiting.pop(key).commands
        if (error := done.exception()) is not None:
            self._refuse(session, key, str(error), isinstance(error, ValueError))
            return
        self._submit(session, key, done.result())
        for command in commands:
            self._engine.post(command)

    def _submit(self, session: Session, key: SequenceKey, new: NewSequence) -> None:
        answer = self._engine.call(lambda engine: engine.submit(new))
        answer.add_done_callback(partial(self._submitted, session, key))

    def _submitted(self, session: Session, key: SequenceKey, answer: asyncio.Future[None]) -> None:
        if (error := answer.exception()) is not None:
            self._refuse(session, key, str(error), isinstance(error, NeverFits))

    def _refuse(self, session: Session, key: SequenceKey, reason: str, never: bool) -> None:
        if session.held.pop(key, None) is not None:
            reject(session, key, reason, never)


def reject(session: Session, key: SequenceKey, reason: str, never: bool) -> None:
    """Send the router a rejection. `never`: no worker with this model could accept the request."""
    rejected = wire.Rejected(request=key.request, attempt=key.attempt, reason=reason, never=never)
    session.put(wire.ToRouter(rejected=rejected))


def _answers(new: NewSequence) -> list[list[int]]:
    """Return the non-empty answers so far among all choices of a sequence."""
    logs = [new.tokens, *(sibling.tokens for sibling in new.siblings)]
    return [list(log[new.num_prompt :]) for log in logs if len(log) > new.num_prompt]
