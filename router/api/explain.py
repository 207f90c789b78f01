"""Explanations of requests: lookup at this router and the others, and conversion to JSON."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response

from penstock.protos import inference_pb2 as pb
from penstock.protos import inference_pb2_grpc
from penstock.router.api.generation.sending import FragmentResponse
from penstock.router.api.http import authorization_of
from penstock.router.errors import Code, ServingError
from penstock.router.frontend import Frontend
from penstock.router.observability.explained_request import (
    ExplainedEvent,
    ExplainedRequest,
    Spent,
)
from penstock.router.observability.snapshot import RouterState
from penstock.router.requests.json_text import dumps
from penstock.router.requests.slices import Slices

Fields: TypeAlias = dict[str, Any]

PATH = "/v1/requests/{id:path}/explain"
FORWARDED = "penstock-forwarded"
"""Metadata key that marks calls from another router, which are not forwarded again."""
TRAILER = "penstock-explain"
"""Trailing metadata key of Generate; the value is the short form of the explanation, as JSON."""
MAX_REQUESTS = 64
"""Maximum number of requests in one reply; if there are more, the newest ones are returned."""
MAX_SHORT = 8
"""Maximum number of workers and of reasons in a short form, because gRPC limits metadata."""
FORWARD_SECONDS = 2.0
"""Time limit of a call to another router."""
UNSPECIFIED = ("0.0.0.0", "[::]")
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Explainer:
    """Finds the explanations of requests at this router, or else at the other routers.

    Args:
        frontend: has the explanations of this router and the addresses of the other routers.
    """

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def explain(
        self, request_id: str, tenant: str | None, authorization: str | None, is_forwarded: bool
    ) -> pb.ExplainReply:
        """Return the explanation of the requests with the id `request_id`.

        Args:
            request_id: the client's id of the requests.
            tenant: the tenant whose requests the caller may see, or None for all tenants.
            authorization: the caller's API key as an Authorization header, which other routers
                check again.
            is_forwarded: whether the call comes from another router, which has not found the
                request.

        Raises:
            ServingError: NOT_FOUND if no router knows the request, UNAVAILABLE if a router that may
                know it does not answer.
        """
        found = self._frontend.explanations.find(request_id, tenant)
        if found:
            now = asyncio.get_running_loop().time()
            return await to_reply(request_id, self._frontend.config.name, found, now)
        others = [] if is_forwarded else self._others()
        replies = await asyncio.gather(
            *(_forward(other, request_id, authorization) for other in others)
        )
        for reply in replies:
            if isinstance(reply, pb.ExplainReply):
                return reply
        failed = ", ".join(
            f"{other.router} ({status.name})"
            for other, status in zip(others, replies, strict=True)
            if isinstance(status, grpc.StatusCode) and status is not grpc.StatusCode.NOT_FOUND
        )
        if failed:
            raise ServingError(
                Code.UNAVAILABLE,
                f"no explanation was found, and these routers could not be asked: {failed}. Try "
                "again",
            )
        raise ServingError(
            Code.NOT_FOUND,
            f"no explanation of the request {request_id[:80]!r} is known to this API key: the id "
            "is wrong, the explanation is no longer kept, or another API key sent the request",
        )

    def _others(self) -> Sequence[RouterState]:
        own = self._frontend.config.name
        return [
            each
            for each in self._frontend.routers
            if each.router != own and each.grpc and each.state != "down"
        ]

    async def http(self, request: Request) -> Response:
        """Return the explanation as JSON."""
        state = request.state
        reply = await self.explain(
            request.path_params["id"],
            None if state.is_operator else state.tenant,
            authorization_of(request.scope),
            is_forwarded=False,
        )
        return FragmentResponse(_json_fragments(reply))

    def trailer(self, number: int, request_id: str) -> Sequence[tuple[str, str]]:
        """Return the trailing metadata of a call to Generate; empty if the request is unknown."""
        explained = self._frontend.explanations.get(number, request_id)
        if explained is None:
            return ()
        now = asyncio.get_running_loop().time()
        return ((TRAILER, short_form(self._frontend.config.name, explained, now)),)


async def _forward(
    other: RouterState, request_id: str, authorization: str | None
) -> pb.ExplainReply | grpc.StatusCode:
    """Return another router's reply, or the status of its error."""
    metadata = [(FORWARDED, "1")]
    if authorization is not None:
        metadata.append(("authorization", authorization))
    try:
        async with grpc.aio.insecure_channel(peer_address(other), CHANNEL_OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            message = pb.ExplainRequest(request_id=request_id)
            reply: pb.ExplainReply = await stub.Explain(
                message, metadata=metadata, timeout=FORWARD_SECONDS
            )
            return reply
    except grpc.aio.AioRpcError as error:
        return error.code()


def peer_address(other: RouterState) -> str:
    """Return the gRPC address at which this router reaches another one."""
    host, _, port = other.grpc.rpartition(":")
    return f"{other.node}:{port}" if host in UNSPECIFIED and other.node else other.grpc


# ------------------------------------------------------------------ formats


async def to_reply(
    request_id: str, router: str, found: Sequence[ExplainedRequest], now: float
) -> pb.ExplainReply:
    """Return a reply with the newest of the requests `found`, which are sorted by arrival."""
    kept = found[-MAX_REQUESTS:]
    reply = pb.ExplainReply(request_id=request_id, router=router, left_out=len(found) - len(kept))
    slices = Slices()
    for explained in kept:
        reply.requests.append(_explanation(explained, now))
        await slices.pause()
    return reply


def _explanation(explained: ExplainedRequest, now: float) -> pb.Explanation:
    return pb.Explanation(
        tenant=explained.tenant_name,
        arrived_at=explained.arrived_at,
        state=explained.state.value,
        finish_reason=explained.finish_reason,
        choices=explained.num_choices,
        prompt_tokens=explained.num_prompt,
        cached_prompt_tokens=explained.num_cached,
        completion_tokens=explained.num_tokens,
        seconds=explained.elapsed(now),
        first_token_seconds=explained.first_token,
        prefill_steps=explained.prefill_steps,
        preemptions=explained.num_preemptions,
        failovers=explained.num_failovers,
        migrations=explained.num_migrations,
        transferred_bytes=explained.num_bytes,
        times=[
            pb.PhaseTime(phase=phase.name.lower(), seconds=seconds)
            for phase, seconds in zip(Spent, explained.times(now), strict=True)
        ],
        events=[_event(each) for each in explained.events],
        events_left_out=explained.num_left_out,
    )


def _event(event: ExplainedEvent) -> pb.ExplainEvent:
    return pb.ExplainEvent(
        seconds=event.seconds,
        kind=event.kind,
        worker=event.worker,
        other_worker=event.other_worker,
        detail=event.detail,
        tokens=event.tokens,
        bytes=event.num_bytes,
        candidates=[
            pb.Candidate(
                worker=each.worker,
                role=each.role,
                state=each.state,
                cost=each.cost,
                queued_tokens=each.queued_tokens,
                sequences=each.num_sequences,
                cached_tokens=each.cached_tokens,
                has_capacity=each.has_capacity,
            )
            for each in event.candidates
        ],
        num_workers=event.num_workers,
    )


def _json_fragments(reply: pb.ExplainReply) -> Iterator[str]:
    """Yield a reply as JSON, with one request per fragment."""
    names = f'"request_id":{dumps(reply.request_id)},"router":{dumps(reply.router)}'
    yield f'{{{names},"requests":['
    for number, explanation in enumerate(reply.requests):
        yield ("," if number else "") + dumps(_to_json(explanation))
    yield f'],"left_out":{reply.left_out}}}'


def _to_json(message: Message) -> Fields:
    """Return all fields of a message by name, including fields with default values."""
    return {
        field.name: _json_value(getattr(message, field.name)) for field in message.DESCRIPTOR.fields
    }


def _json_value(value: Any) -> Any:
    if isinstance(value, Message):
        return _to_json(value)
    if isinstance(value, str | int | float):
        return value
    return [_json_value(each) for each in value]


def short_form(router: str, explained: ExplainedRequest, now: float) -> str:
    """Return the short form of an explanation as ASCII JSON: workers, reasons, and times in ms."""
    placed = [event for event in explained.events if event.kind in ("placed", "submitted")]
    times = zip(Spent, explained.times(now), strict=True)
    facts = {
        "router": router,
        "workers": list(dict.fromkeys(event.worker for event in placed))[:MAX_SHORT],
        "reasons": [event.detail for event in placed][:MAX_SHORT],
        "cached_prompt_tokens": explained.num_cached,
        "ms": {phase.name.lower(): round(1e3 * spent, 2) for phase, spent in times if spent},
        "transferred_bytes": explained.num_bytes,
        "failovers": explained.num_failovers,
        "migrations": explained.num_migrations,
        "preemptions": explained.num_preemptions,
    }
    return _encode({name: fact for name, fact in facts.items() if fact})
