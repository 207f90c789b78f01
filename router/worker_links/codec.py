"""Conversion between messages of the router-worker stream and records of `routing.events`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import (
    decode_worker_load,
    encode_sampling_params,
    pack_tokens,
)
from penstock.router.routing import events as ev
from penstock.router.routing.prefix_cache.cache_events import (
    CacheChange,
    CacheEvents,
    CacheSnapshot,
    ResyncCache,
)
from penstock.router.routing.transfer_peers import ConnectPeers, TransferEndpoint
from penstock.router.worker_links.message_checks import (
    check_load,
    check_logprobs,
    check_welcome,
)

FINISHES = frozenset(ev.Finish)


def decode_welcome(welcome: pb.Welcome) -> ev.WorkerInfo:
    """Decode a Welcome message into a `WorkerInfo`.

    Raises:
        ValueError: the message has values that no worker can have.
    """
    check_welcome(welcome)
    return ev.WorkerInfo(
        worker=welcome.worker,
        incarnation=welcome.incarnation,
        role=welcome.role,
        layout=welcome.layout,
        block_size=welcome.block_size,
        num_blocks=welcome.num_blocks,
        max_model_len=welcome.max_model_len,
        max_sequences=welcome.max_sequences,
        step_bounds=tuple(welcome.step_bounds),
        machine=welcome.machine,
        transfer=_decode_endpoint(welcome.transfer) if welcome.HasField("transfer") else None,
        step_token_bounds=tuple(welcome.step_token_bounds),
        max_batched_tokens=welcome.max_batched_tokens,
        enough_prompt_tokens=welcome.enough_prompt_tokens,
    )


def decode_step(worker: str, step: pb.Step) -> ev.Stepped:
    """Decode a Step message into a `Stepped` event.

    Raises:
        ValueError: the arrays of the message differ in length, a finish reason is unknown, or the
            load or the logprobs are impossible.
    """
    check_load(step.load)
    check_logprobs(step.logprobs)
    for prompt in step.prompts:
        check_logprobs(prompt.entries)
    return ev.Stepped(
        worker,
        _decode_tokens(step),
        decode_worker_load(step.load) if step.HasField("load") else None,
        [(entry.request, entry.attempt, entry.reason) for entry in step.ended],
        [
            ev.ScoredPrompt(entry.request, entry.attempt, entry.position, list(entry.entries))
            for entry in step.prompts
        ],
        [(entry.request, entry.attempt, entry.tokens) for entry in step.cached],
        step.preempted[:],
    )


def slices_of(step: ev.Stepped, max_tokens: int) -> Iterator[ev.Stepped]:
    """Split a large step into consecutive steps of at most `max_tokens` tokens each.

    The first of these steps contains the data about prompts and preemptions, and the last one
    contains the worker's load and the failed requests. A step without tokens gives no steps.
    """
    tokens, count = step.tokens, len(step.tokens)
    for start in range(0, count, max_tokens):
        end = min(start + max_tokens, count)
        is_first, is_last = start == 0, end == count
        yield ev.Stepped(
            step.worker,
            tokens.select(range(start, end)),
            step.load if is_last else None,
            step.ended if is_last else (),
            step.prompts if is_first else (),
            step.cached if is_first else (),
            step.preempted if is_first else (),
        )


def _decode_tokens(step: pb.Step) -> ev.TokenColumns:
    # The slice `[:]` copies a repeated protobuf field into a list.
    requests, attempts, choices = step.request[:], step.attempt[:], step.choice[:]
    positions, tokens, finishes = step.position[:], step.token[:], step.finish[:]
    columns = (requests, attempts, choices, positions, tokens, finishes)
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise ValueError(f"the arrays of a step differ in length: {sorted(lengths)}")
    if not FINISHES.issuperset(finishes):
        raise ValueError(f"a step has unknown finish reasons: {sorted(set(finishes) - FINISHES)}")
    logprobs = {entry.row: entry for entry in step.logprobs} if step.logprobs else {}
    return ev.TokenColumns(requests, attempts, choices, positions, tokens, finishes, logprobs)


def decode_cache_events(worker: str, message: pb.CacheEvents) -> CacheEvents:
    """Decode the cache events of a Step."""
    changes = [
        CacheChange(change.evicted[:], change.stored[:], change.parents[:], change.lengths[:])
        for change in message.changes
    ]
    return CacheEvents(worker, message.incarnation, message.first, changes)


def _decode_cache_snapshot(worker: str, body: pb.CacheSnapshot) -> ev.Event:
    return CacheSnapshot(worker, body.incarnation, body.next, body.chunk, body.last, body.blocks[:])


def _decode_yielded(worker: str, body: pb.Yielded) -> ev.Event:
    return ev.Yielded(worker, body.request, body.attempt, body.kv_len)


def _decode_endpoint(body: pb.TransferEndpoint) -> TransferEndpoint:
    return TransferEndpoint(body.worker, body.incarnation, body.address, body.secret)


def _decode_ready(worker: str, body: pb.Ready) -> ev.Event:
    at = _decode_endpoint(body.at)
    return ev.Ready(worker, body.request, body.attempt, body.epoch, body.have, at)


def _decode_received(worker: str, body: pb.Received) -> ev.Event:
    return ev.Received(worker, body.request, body.attempt, body.epoch, body.bytes)


def _decode_failed(worker: str, body: pb.Failed) -> ev.Event:
    return ev.Failed(worker, body.request, body.attempt, body.epoch, body.reason)


def _decode_rejected(worker: str, body: pb.Rejected) -> ev.Event:
    return ev.Rejected(worker, body.request, body.attempt, body.reason, body.never)


def _decode_heartbeat(worker: str, body: object) -> ev.Event:
    return ev.Heartbeat(worker)


def _decode_draining(worker: str, body: object) -> ev.Event:
    return ev.Draining(worker)


DECODERS: Mapping[str, Callable[[str, Any], ev.Event]] = {
    "step": decode_step,
    "yielded": _decode_yielded,
    "ready": _decode_ready,
    "received": _decode_received,
    "failed": _decode_failed,
    "rejected": _decode_rejected,
    "draining": _decode_draining,
    "cache_snapshot": _decode_cache_snapshot,
    "heartbeat": _decode_heartbeat,
}


def decode_event(worker: str, message: pb.ToRouter) -> ev.Event:
    """Decode a worker's message into an event.

    Raises:
        ValueError: the message has an unexpected type or invalid values.
    """
    kind = message.WhichOneof("body")
    if kind is None or kind not in DECODERS:
        raise ValueError(f"the worker sent a message of the unexpected type {kind}")
    return DECODERS[kind](worker, getattr(message, kind))


def encode_submit(command: ev.Submit) -> pb.ToWorker:
    """Encode a Submit command as a message.

    The message contains no log for a choice that has no tokens and has not ended. It does not
    contain the priority either, because priorities only order requests in the router's queue.
    """
    request = command.request
    # `ToWorker(submit=Submit(...))` would copy the prompt once more.
    message = pb.ToWorker(
        submit={
            "request": request.id,
            "attempt": command.attempt,
            "prompt": request.packed_prompt or pack_tokens(request.prompt),
            "yield_after": command.yield_after,
            "salt": request.salt,
            "request_id": request.external_id,
            "prompt_known": command.prompt_known,
        }
    )
    submit = message.submit
    encode_sampling_params(request.params, submit.params)
    for choice, (tokens, finished) in enumerate(zip(command.log, command.finished, strict=True)):
        if tokens or finished:
            submit.log.add(choice=choice, tokens=pack_tokens(tokens), finished=finished)
    if command.source is not None:
        source = command.source
        submit.source.worker = source.worker
        submit.source.incarnation = source.incarnation
        submit.source.attempt = source.attempt
        submit.source.kv_len = source.kv_len
        submit.source.layout = source.layout
    return message


def _encode_yield(command: ev.Yield) -> pb.ToWorker:
    message = pb.ToWorker()
    # `yield` is a keyword, so `message.yield` would be a syntax error.
    body: pb.Yield = getattr(message, "yield")
    body.CopyFrom(pb.Yield(request=command.request, attempt=command.attempt))
    return message


def _encode_endpoint(endpoint: TransferEndpoint) -> pb.TransferEndpoint:
    return pb.TransferEndpoint(
        worker=endpoint.worker,
        incarnation=endpoint.incarnation,
        address=endpoint.address,
        secret=endpoint.secret,
    )


def _encode_send(command: ev.Send) -> pb.ToWorker:
    return pb.ToWorker(
        send=pb.Send(
            request=command.request,
            attempt=command.attempt,
            to=_encode_endpoint(command.endpoint),
            epoch=command.epoch,
            have=command.have,
            to_attempt=command.to_attempt,
        )
    )


def _encode_drop(command: ev.Drop) -> pb.ToWorker:
    return pb.ToWorker(
        drop=pb.Drop(request=command.request, attempt=command.attempt, choice=command.choice)
    )


def _encode_resync_cache(command: ResyncCache) -> pb.ToWorker:
    return pb.ToWorker(resync_cache=pb.ResyncCache())


def _encode_connect_peers(command: ConnectPeers) -> pb.ToWorker:
    destinations = [_encode_endpoint(each) for each in command.destinations]
    return pb.ToWorker(connect_peers=pb.ConnectPeers(destinations=destinations))


ENCODERS: Mapping[type, Callable[[Any], pb.ToWorker]] = {
    ev.Submit: encode_submit,
    ev.Yield: _encode_yield,
    ev.Send: _encode_send,
    ev.Drop: _encode_drop,
    ResyncCache: _encode_resync_cache,
    ConnectPeers: _encode_connect_peers,
}


def encode_command(command: ev.WorkerCommand) -> pb.ToWorker:
    """Encode a command as a message; the worker link sets the message number."""
    return ENCODERS[type(command)](command)
