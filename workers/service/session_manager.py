"""Passes commands from routers to the engine, and results from the engine to routers.

All methods run on the event loop; they handle commands and results one at a time and never wait for
a step. `docs/lifecycle.md` specifies the messages.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

import grpc

from penstock.common.worker_load import WorkerLoad
from penstock.protos import worker_pb2 as wire
from penstock.protos.worker_codec import TOKEN_BYTES, encode_worker_load, num_prompt_tokens
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.engine_thread import EngineThread
from penstock.workers.engine.results import StepResult
from penstock.workers.engine.step_times import StepRecord
from penstock.workers.health.canary import KEY as CANARY
from penstock.workers.health.canary import LivenessMonitor, make_canary
from penstock.workers.health.watchdog import ProgressTimer
from penstock.workers.kv_transfer.coordinator import KvTransfer
from penstock.workers.kv_transfer.staging import WorkerIdentity
from penstock.workers.service.cache_stream import CacheStream
from penstock.workers.service.codec import (
    BadSubmit,
    SequenceKey,
    Vocabulary,
    beam_result_message,
    new_sequence,
    sequence_key,
    step_messages,
)
from penstock.workers.service.session import HeldSequence, Session
from penstock.workers.service.submitter import Submitter, reject

log = logging.getLogger(__name__)


_STEP_SECONDS = 10.0  # longest time to wait for the last step


class BadCommand(ValueError):
    """A message that is not valid on this stream; the text gives the reason."""


class SessionManager:
    """Manages the sessions of all routers with one engine, and starts the engine's thread.

    Args:
        engine: the engine; afterwards, only the thread that the constructor starts may call it.
        identity: identity of the worker, for KV transfers.
        address: address of the worker's service, for KV transfers.
        seconds: time without progress after which a KV transfer is aborted.
        canary_seconds: time without a step after which `maybe_send_canary` sends a canary.
        timer: watchdog timer of the engine's thread; None: no watchdog.
    """

    def __init__(
        self,
        engine: Engine,
        identity: WorkerIdentity,
        address: str,
        seconds: float,
        canary_seconds: float,
        timer: ProgressTimer | None = None,
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draining = False
        self._liveness = LivenessMonitor(canary_seconds, time.monotonic())
        self._sessions: dict[int, Session] = {}
        self._vocabulary = Vocabulary(engine.spec.vocab_size, engine.spec.eos_tokens)
        self._engine = EngineThread(engine, self._deliver, self._fail, timer)
        self.kv_transfer = KvTransfer(identity, address, engine.movers, self._engine, seconds)
        self._cache_stream = CacheStream(identity.incarnation, self._engine)
        self._submitter = Submitter(self._engine, engine.grammars, engine.limits.max_queued)
        self.load = self._load_message(engine.load())

    # ------------------------------------------------------------ sessions

    def open(self, session: Session) -> None:
        """Add a router's stream; end an earlier stream of the same router first."""
        for earlier in list(self._sessions.values()):
            if earlier.router == session.router:
                earlier.end(grpc.StatusCode.ABORTED, "the router has opened another stream")
                self.close(earlier)
        self._sessions[session.session_id] = session
        self._cache_stream.open(session)

    def close(self, session: Session) -> None:
        """Remove a session whose stream has ended, and drop all sequences held for it."""
        self._sessions.pop(session.session_id, None)
        self._cache_stream.close(session)
        self.kv_transfer.sender.forget_peers(session.session_id)
        self._release(session, list(session.held))

    def drain(self) -> None:
        """Refuse new sequences from now on, and notify the routers."""
        self.draining = True
        for session in self._sessions.values():
            session.put(wire.ToRouter(draining=wire.Draining()))

    @property
    def idle(self) -> bool:
        """True if no sequence is held for any router."""
        return not any(session.held for session in self._sessions.values())

    @property
    def silence(self) -> float:
        """Seconds since the last successful step."""
        return self._liveness.silence(time.monotonic())

    def maybe_send_canary(self) -> None:
        """Send a canary if no step has succeeded for `canary_seconds`. Call periodically."""
        if self._liveness.due(time.monotonic()):
            answer = self._engine.call(lambda engine: engine.submit(make_canary()))
            answer.add_done_callback(self._sent_canary)

    def _sent_canary(self, answer: asyncio.Future[None]) -> None:
        if answer.exception() is not None:
            self._liveness.ended(time.monotonic())

    def stop(self, code: grpc.StatusCode, reason: str) -> None:
        """End every stream, every KV transfer and the engine."""
        for session in list(self._sessions.values()):
            session.end(code, reason)
        self.kv_transfer.stop()
        self._submitter.stop()
        self._engine.stop()

    async def stopped(self) -> None:
        """Wait until the engine's thread has ended, at most `_STEP_SECONDS`."""
        await asyncio.to_thread(self._engine.join, _STEP_SECONDS)

    async def step_records(self) -> Sequence[StepRecord]:
        """Return the records of the engine's latest steps, oldest first."""
        return await self._engine.call(lambda engine: engine.outputs.times.records())

    def send_heartbeat(self, session: Session) -> None:
        """Send the load if it has changed, otherwise an empty heartbeat."""
        self.load = _with_grammars(self.load, self._submitter.num_waiting)
        if session.last_load == self.load:
            session.put(wire.ToRouter(heartbeat=wire.Heartbeat()))
        else:
            self._put_step(session, wire.Step())

    # ------------------------------------------------------------ from the router

    def handle(self, session: Session, message: wire.ToWorker) -> None:
        """Handle one message of a router. Raises BadCommand if the message is not valid."""
        match message.WhichOneof("body"):
            case "submit":
                self._submit(session, message.submit)
            case "yield":
                request = getattr(message, "yield")  # `yield` is a keyword of Python
                key = session.key(request.request, request.attempt)
                self._submitter.post(key, lambda engine: engine.request_yield(key))
            case "send":
                self.kv_transfer.send(session, message.send)
            case "drop":
                self._drop(session, message.drop)
            case "resync_cache":
                self._cache_stream.resync(session)
            case "connect_peers":
                self.kv_transfer.set_peers(session, message.connect_peers)
            case "heartbeat":
                pass
            case other:
                raise BadCommand(f"unexpected message from the router: {other or 'empty'}")

    def _submit(self, session: Session, submit: wire.Submit) -> None:
        key = session.key(submit.request, submit.attempt)
        others = [held for held in session.held if held.request == key.request]
        if any(other.attempt >= key.attempt for other in others):
            reject(
                session,
                key,
                f"attempt {key.attempt} of this request, or a later one, is already on this worker",
                True,
            )
            return
        if self.draining:
            reject(session, key, "the worker is draining", False)
            return
        source_len = self.kv_transfer.source_len(submit.source)
        try:
            new = new_sequence(submit, key, self._vocabulary, source_len)
        except BadSubmit as error:
            reject(session, key, str(error), True)
            return
        log.info("sequence", extra={"fields": _log_fields(submit)})
        # This attempt replaces earlier attempts of the request, but not their leases.
        # One of the leases may be the KV source of this attempt.
        self._release(session, [other for other in others if not session.held[other].kv_len])
        source = (submit.source.worker, submit.source.incarnation)
        session.held[key] = HeldSequence(source if new.source_len else None)
        self._submitter.submit(session, key, new)

    def _drop(self, session: Session, drop: wire.Drop) -> None:
        key = session.key(drop.request, drop.attempt)
        if key not in session.held:
            return
        if drop.HasField("choice"):
            self._submitter.post(key, lambda engine: engine.drop_choice(key, drop.choice))
        else:
            self._release(session, [key])

    def _release(self, session: Session, keys: list[SequenceKey]) -> None:
        """Drop sequences and leases, and abort their KV transfers in both directions."""
        if not keys:
            return
        self._engine.post(partial(_drop_all, keys))
        for key in keys:
            self._submitter.cancel(key)
            held = session.held.pop(key)
            if held.epoch:
                self.kv_transfer.receiver.close(held.epoch)
            for outgoing in held.sends:
                outgoing.aborted = True

    # ------------------------------------------------------------ from the engine

    def _deliver(self, result: StepResult, load: WorkerLoad) -> None:
        """Send a step's results to the routers; a sequence's tokens are sent before its events."""
        self._record_step(result, load)
        steps = step_messages(result, self._is_held)
        if result.output is None:
            # Commands have changed the load, but there is no step that reports the new load.
            for number in self._sessions:
                steps.setdefault(number, wire.Step())
        self._cache_stream.add_change(result.cache, steps)
        for number, step in steps.items():
            self._put_step(self._sessions[number], step)
        for found in result.beam_results:
            key = sequence_key(found.key)
            if self._is_held(key):
                self._put_step(
                    self._sessions[key.session], beam_result_message(found), no_merge=True
                )
        self._cache_stream.send_snapshot(result.cache)
        for key in map(sequence_key, (*result.failed, *result.finished)):
            if self._is_held(key):
                del self._sessions[key.session].held[key]
        for yielded in result.yielded:
            self._yielded(sequence_key(yielded.key), yielded.kv_len)
        for reserved in result.reserved:
            key = sequence_key(reserved.key)
            self.kv_transfer.expect(self._sessions.get(key.session), reserved)

    def _record_step(self, result: StepResult, load: WorkerLoad) -> None:
        """Record the time of a successful step, and the load unless only a canary is running."""
        now = time.monotonic()
        if result.output is not None and not result.failed:
            self._liveness.computed(now)
        is_over = CANARY in result.finished or CANARY in result.failed
        if is_over:
            self._liveness.ended(now)
        if is_over or result.output is None or result.output.keys != [CANARY]:
            self.load = self._load_message(load)

    def _is_held(self, key: SequenceKey) -> bool:
        session = self._sessions.get(key.session)
        return session is not None and key in session.held

    def _yielded(self, key: SequenceKey, kv_len: int) -> None:
        if not self._is_held(key):
            return
        session = self._sessions[key.session]
        if kv_len:
            session.held[key].kv_len = kv_len
        else:
            del session.held[key]
        message = wire.Yielded(request=key.request, attempt=key.attempt, kv_len=kv_len)
        session.put(wire.ToRouter(yielded=message))

    def _put_step(self, session: Session, step: wire.Step, no_merge: bool = False) -> None:
        step.load.CopyFrom(self.load)
        session.last_load = self.load
        session.put(wire.ToRouter(step=step), no_merge)

    def _load_message(self, load: WorkerLoad) -> wire.Load:
        kv_transfer, waiting = self.kv_transfer, self._submitter.num_waiting
        received, sent = kv_transfer.receiver.bytes_received, kv_transfer.sender.bytes_sent
        load = load._replace(bytes_received=received, bytes_sent=sent, awaiting_grammar=waiting)
        return encode_worker_load(load)

    def _fail(self, error: BaseException) -> None:
        """End all streams, because the engine has failed, and set `failed`."""
        reason = f"the engine failed: {type(error).__name__}: {error}"
        self.stop(grpc.StatusCode.INTERNAL, reason)
        if not self.failed.done():
            self.failed.set_exception(RuntimeError(reason))


def _with_grammars(load: wire.Load, num_waiting: int) -> wire.Load:
    """Return `load` with the number of sequences that wait for grammars.

    This number may change between steps. The result is a copy, because each session keeps the load
    that it sent last.
    """
    if load.awaiting_grammar == num_waiting:
        return load
    found = wire.Load()
    found.CopyFrom(load)
    found.awaiting_grammar = num_waiting
    return found


def _log_fields(submit: wire.Submit) -> dict[str, str | int]:
    """Return the log fields of a submission, without text and tokens."""
    return {
        "request": submit.request_id,
        "attempt": submit.attempt,
        "prompt_tokens": num_prompt_tokens(submit),
        "answer_tokens": sum(len(each.tokens) // TOKEN_BYTES for each in submit.log),
        "source": submit.source.worker,
    }


def _drop_all(keys: list[SequenceKey], engine: Engine) -> None:
    for key in keys:
        engine.drop(key)
