"""Conversion between messages of the router-worker stream and records of `routing.events`."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import decode_worker_load, encode_sampling_params
from penstock.router.routing import events as ev

PROTOCOL_VERSION = 1

FINISHES = {finish.value: finish for finish in ev.Finish}


def decode_welcome(welcome: pb.Welcome) -> ev.WorkerInfo:
    """Decode a Welcome message into a `WorkerInfo`."""
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
    )


def decode_step(worker: str, step: pb.Step) -> ev.Stepped:
    """Decode a Step message into a `Stepped` event.

    Raises:
        ValueError: the arrays of the message differ in length.
    """
    logprobs: dict[int, object] = {entry.row: entry for entry in step.logprobs}
    tokens = [
        ev.NewToken(request, attempt, choice, position, token, FINISHES[finish], logprobs.get(row))
        for row, (request, attempt, choice, position, token, finish) in enumerate(
            zip(
                step.request,
                step.attempt,
                step.choice,
                step.position,
                step.token,
                step.finish,
                strict=True,
            )
        )
    ]
    return ev.Stepped(
        worker,
        tokens,
        decode_worker_load(step.load) if step.HasField("load") else None,
        [(entry.request, entry.attempt, entry.reason) for entry in step.ended],
        [
            ev.ScoredPrompt(entry.request, entry.attempt, entry.position, list(entry.entries))
            for entry in step.prompts
        ],
    )


def _decode_yielded(worker: str, body: pb.Yielded) -> ev.Event:
    return ev.Yielded(worker, body.request, body.attempt, body.kv_len)


def _decode_ready(worker: str, body: pb.Ready) -> ev.Event:
    at = ev.TransferEndpoint(body.at.worker, body.at.incarnation, body.at.address, body.at.secret)
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
    # There is no prefix index yet that would use block events: treat them as heartbeats.
    "stored": _decode_heartbeat,
    "evicted": _decode_heartbeat,
    "heartbeat": _decode_heartbeat,
}


def decode_event(worker: str, message: pb.ToRouter) -> ev.Event:
    """Decode a worker's message into an event.

    Raises:
        ValueError: the message has an unexpected type or invalid values.
    """
    kind = message.WhichOneof("body")
    if kind is None or kind not in DECODERS:
        raise ValueError(f"unexpected message of type {kind}")
    try:
        return DECODERS[kind](worker, getattr(message, kind))
    except KeyError as error:
        raise ValueError(f"unknown value in a message of type {kind}: {error}") from error


def encode_submit(command: ev.Submit) -> pb.ToWorker:
    """Encode a Submit command as a message; the log omits open choices without tokens."""
    request = command.request
    submit = pb.Submit(
        request=request.id,
        attempt=command.attempt,
        prompt=request.prompt,
        params=encode_sampling_params(request.params),
        yield_after=command.yield_after,
        priority=request.priority,
        salt=request.salt,
        request_id=request.external_id,
        prompt_known=command.prompt_known,
    )
    for choice, (tokens, finished) in enumerate(zip(command.log, command.finished, strict=True)):
        if tokens or finished:
            submit.log.add(choice=choice, tokens=tokens, finished=finished)
    if command.source is not None:
        source = command.source
        submit.source.worker = source.worker
        submit.source.incarnation = source.incarnation
        submit.source.attempt = source.attempt
        submit.source.kv_len = source.kv_len
        submit.source.layout = source.layout
    return pb.ToWorker(submit=submit)


def _encode_yield(command: ev.Yield) -> pb.ToWorker:
    message = pb.ToWorker()
    body: pb.Yield = getattr(message, "yield")  # `message.yield` is a syntax error
    body.CopyFrom(pb.Yield(request=command.request, attempt=command.attempt))
    return message


def _encode_send(command: ev.Send) -> pb.ToWorker:
    to = command.endpoint
    return pb.ToWorker(
        send=pb.Send(
            request=command.request,
            attempt=command.attempt,
            to=pb.TransferEndpoint(
                worker=to.worker, incarnation=to.incarnation, address=to.address, secret=to.secret
            ),
            epoch=command.epoch,
            have=command.have,
            to_attempt=command.to_attempt,
        )
    )


def _encode_drop(command: ev.Drop) -> pb.ToWorker:
    return pb.ToWorker(
        drop=pb.Drop(request=command.request, attempt=command.attempt, choice=command.choice)
    )


ENCODERS: Mapping[type, Callable[[Any], pb.ToWorker]] = {
    ev.Submit: encode_submit,
    ev.Yield: _encode_yield,
    ev.Send: _encode_send,
    ev.Drop: _encode_drop,
}


def encode_command(command: ev.Submit | ev.Yield | ev.Send | ev.Drop) -> pb.ToWorker:
    """Encode a command as a message; the worker link sets the message number."""
    return ENCODERS[type(command)](command)
