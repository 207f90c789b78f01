"""Strategies for inputs of the fuzz run: HTTP requests, bytes that are almost HTTP, gRPC calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st
from pydantic import BaseModel

from penstock.protos import inference_pb2
from penstock.router.api.anthropic.schema import CountTokensBody, MessagesBody
from penstock.router.api.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from penstock.router.api.openai.unsupported_fields import PERMITTED_VALUES
from penstock.router.api.responses.body import ResponsesRequest
from tests.fuzz.inputs import GrpcInput, Input, Port, RawInput
from tests.fuzz.values import (
    JUNK,
    TEXTS,
    Values,
    damaged,
    malformed,
    messages_of,
    one_in,
    values_of,
)
from tests.support.api_keys import METRICS, OPERATOR

USER = "sesame-of-a-user"
ORIGIN = "https://chat.example"
WORKERS = ("w0", "w1")

BODIES: Mapping[str, Sequence[type[BaseModel]]] = {
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatCompletionRequest,),
    "/v1/messages": (MessagesBody,),
    "/v1/messages/count_tokens": (CountTokensBody,),
    "/tokenize": (TokenizeTextRequest, TokenizeChatRequest),
    "/detokenize": (DetokenizeRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/responses/{id}/cancel": (),
    "/role": (),
    "/drain": (),
}
"""For each POST route: the pydantic models of its body, from whose fields bodies are drawn."""

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
METHODS: Mapping[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for service in SERVICES
    for method in service.methods
}

KNOWN_ID = "known"
"""A request id that many calls use, so that calls for explanations find a request with this id."""

STREAMS = ("/live",)
"""Routes whose responses end only with the connection."""

BEARERS = st.sampled_from(
    [
        *[f"Bearer {USER}"] * 9,
        f"Bearer {OPERATOR}",
        f"Bearer {METRICS}",
        "Bearer x",
        "",
        "Basic \xff",
    ]
)
HEADERS: Mapping[str, Values] = {
    "accept": st.sampled_from(
        ["*/*", "text/plain;version=x", "application/openmetrics-text;version=abc", ";;,", "\xff"]
    ),
    "access-control-request-headers": TEXTS,
    "access-control-request-method": st.sampled_from(["POST", "PUT", "x"]),
    "content-encoding": st.sampled_from(["gzip", "identity"]),
    "cookie": TEXTS,
    "expect": st.sampled_from(["100-continue", "x"]),
    "host": st.sampled_from(["evil.example", "[::1]:1", "", "localhost:99999999"]),
    "origin": st.sampled_from([ORIGIN, "null", "http://evil.example"]),
    "upgrade": st.sampled_from(["websocket", "h2c"]),
    "x-api-key": st.sampled_from(["x", "", "\xff"]),
    "x-request-id": TEXTS,
    "x-forwarded-for": TEXTS,
}
"""Headers that a router or one of its libraries reads, with odd values."""


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A route of one of the HTTP ports."""

    port: Port
    method: str
    path: str


def _json(value: object) -> bytes:
    return json.dumps(value).encode()  # Python writes NaN and infinities as bare words


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """Draw a JSON body for a route; some bodies have an unsupported field."""
    models = BODIES[path]
    if path == "/drain":  # a drained router would refuse all later requests
        return {"drain": draw(st.one_of(st.just(False), TEXTS))}
    if not models:
        worker = draw(st.sampled_from(["w1", "w1", "w9"]))
        role = draw(st.one_of(st.sampled_from(["prefill", "decode", "mixed"]), TEXTS))
        return {"worker": worker, "role": role}
    model = draw(st.sampled_from(models))
    body: dict[str, Any] = draw(values_of(model))
    if "prompt" in model.model_fields and "prompt" not in body:
        body["prompt"] = draw(st.sampled_from(["hi", [5, 6], ["a", "b"], [[7], [8, 9]]]))
    if "messages" in model.model_fields and draw(st.booleans()):
        body["messages"] = [{"role": "user", "content": "hi"}]
    # Most bodies get the served model's name, because a body with another name is always refused.
    if issubclass(model, CountTokensBody) and not draw(one_in(8)):
        body["model"] = "stub"
    if "input" in model.model_fields and draw(st.booleans()):
        body["input"] = draw(st.sampled_from(["hi", [{"role": "user", "content": "hi"}]]))
    if draw(one_in(10)):
        body[draw(st.sampled_from(sorted(PERMITTED_VALUES)))] = draw(JUNK)
    return body


def _line(name: str, value: str) -> bytes:
    clean = value.replace("\r", "").replace("\n", "").replace("\0", "")
    return f"{name}: {clean}\r\n".encode("latin-1", "replace")


@st.composite
def content_of(draw: st.DrawFn, route: HttpRoute) -> bytes:
    """Draw the body of a request; most are JSON objects that the route accepts."""
    if route.method != "POST":
        return draw(st.binary(max_size=9)) if draw(one_in(10)) else b""
    match draw(st.integers(0, 11)):
        case 10:
            return _json(draw(JUNK))
        case 11:
            return draw(damaged(_json(draw(bodies(route.path)))))
    return _json(draw(bodies(route.path)))


@st.composite
def requests(draw: st.DrawFn, route: HttpRoute, is_last: bool) -> bytes:
    """Draw one valid HTTP/1.1 request, whose body may be in chunks."""
    content = draw(content_of(route))
    path = route.path.replace(
        "{name:path}", draw(st.sampled_from(["stub", "a/b", "%00", "..", ""]))
    )
    for name in ("{id:path}", "{id}"):
        path = path.replace(name, draw(st.sampled_from([KNOWN_ID, "a/b", "%00", "..", ""])))
    if draw(one_in(16)):
        path += "?" + draw(st.sampled_from(["a=b", "%ff", "=&=", "stream=true"]))
    odd = draw(st.sets(st.sampled_from(sorted(HEADERS)), max_size=2)) if draw(one_in(3)) else ()
    key = f"Bearer {OPERATOR}" if route.port == "admin" else f"Bearer {USER}"
    bearer = draw(BEARERS) if draw(one_in(10)) else key
    kind = "text/plain" if draw(one_in(20)) else "application/json"
    given = {"host": "localhost", "authorization": bearer, "content-type": kind}
    given |= {name: draw(HEADERS[name]) for name in sorted(odd)}
    if is_last:
        given["connection"] = "close"
    elif "upgrade" in given:
        given["connection"] = "upgrade"
    head = f"{route.method} {path} HTTP/1.1\r\n".encode("latin-1")
    head += b"".join(_line(name, value) for name, value in given.items())
    if not content or not draw(one_in(5)):
        return head + _line("content-length", str(len(content))) + b"\r\n" + content
    cut = draw(st.integers(1, len(content)))
    parts = [part for part in (content[:cut], content[cut:]) if part]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    trailer = draw(st.sampled_from([b"", b"x-checksum: 1\r\n"]))
    return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"


@st.composite
def pieces_of(draw: st.DrawFn, data: bytes) -> tuple[bytes, ...]:
    """Cut bytes at random positions into the pieces that are sent."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    ends = [0, *cuts, len(data)]
    return tuple(data[low:high] for low, high in pairwise(ends) if low < high)


@st.composite
def http_inputs(draw: st.DrawFn, routes: Sequence[HttpRoute]) -> Input:
    """Draw bytes for one connection: one request, several at the same time, or almost HTTP."""
    count = draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
    route = draw(st.sampled_from(routes))
    same = [each for each in routes if each.port == route.port]
    chosen = [*(draw(st.sampled_from(same)) for _ in range(count - 1)), route]
    sent = [draw(requests(each, index == count - 1)) for index, each in enumerate(chosen)]
    data = b"".join(sent)
    match draw(st.integers(0, 9)):
        case 8:
            whole = draw(pieces_of(data[: draw(st.integers(0, len(data)))]))
            return RawInput(route.port, whole, draw(st.sampled_from(["close", "leave"])))
        case 9:
            broken = draw(pieces_of(draw(damaged(data))))
            return RawInput(route.port, broken, draw(st.sampled_from(["close", "leave"])))
        case 7:
            return RawInput(route.port, draw(pieces_of(data)), "close")
    never_ends = b"upgrade" in data or any(each.path in STREAMS for each in chosen)
    is_single = count == 1 and not never_ends
    ending = "leave" if never_ends else "read"
    label = f"{route.method} {route.path}" if is_single else ""
    return RawInput(route.port, draw(pieces_of(data)), ending, label)  # type: ignore[arg-type]


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
PING = b"\0\0\x08\6\0\0\0\0\0" + bytes(8)
HEADERS_FRAME = b"\0\0\1\1\4\0\0\0\1\x82"


@st.composite
def http2_inputs(draw: st.DrawFn) -> Input:
    """Draw bytes for the gRPC port that are almost HTTP/2."""
    frames = st.lists(st.sampled_from([SETTINGS, PING, HEADERS_FRAME]), max_size=3)
    data = draw(st.sampled_from([PREFACE, b"GET / HTTP/1.1\r\n\r\n", b""])) + b"".join(draw(frames))
    data += draw(st.binary(max_size=20))
    if draw(st.booleans()):
        data = draw(damaged(data))
    return RawInput("grpc", draw(pieces_of(data)), draw(st.sampled_from(["close", "leave"])))


METADATA_NAMES = st.sampled_from(["x-request-id", "user-agent", "x-a", "grpc-trace", "origin"])
METADATA_VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


def _serialized(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    message: Any = draw(messages_of(descriptor))
    if "request_id" in descriptor.fields_by_name and draw(st.booleans()):
        message.request_id = KNOWN_ID
    content: bytes = message.SerializeToString()
    return content


@st.composite
def grpc_inputs(draw: st.DrawFn) -> Input:
    """Draw a call of any method, mostly with one message; some messages are malformed."""
    method = draw(st.sampled_from([*METHODS, *[f"/{SERVICES[0].full_name}/Generate"] * 6]))
    descriptor = METHODS[method].input_type
    is_malformed = draw(one_in(6))
    count = draw(st.sampled_from([1] * 12 + [0, 2]))
    messages = tuple(
        draw(malformed(descriptor)) if is_malformed else _serialized(draw, descriptor)
        for _ in range(count)
    )
    bearer = draw(BEARERS) if draw(one_in(10)) else f"Bearer {USER}"
    metadata = [("authorization", bearer)] if bearer.isascii() else []
    metadata += draw(st.lists(st.tuples(METADATA_NAMES, METADATA_VALUES), max_size=1))
    is_ours = METHODS[method].containing_service is SERVICES[0]
    endings = ["read"] * 6 + ["one", "cancel"] if is_ours else ["one", "cancel"]
    timeout = draw(st.sampled_from([None] * 9 + [0.0, 0.001, 1e7])) if is_ours else None
    ending: Any = draw(st.sampled_from(endings))
    name = method + "x" if draw(one_in(50)) else method
    return GrpcInput(name, messages, tuple(metadata), ending, timeout)


def inputs(routes: Sequence[HttpRoute]) -> st.SearchStrategy[Input]:
    """Return the strategy of the fuzz run for the routes of a router."""
    routes = sorted(routes, key=lambda each: (each.port, each.path, each.method))
    posts = [route for route in routes if route.method == "POST"]
    answers = [route for route in posts if route.path.startswith("/v1/")]
    return _chosen(
        [http_inputs(routes), http2_inputs()]
        + [http_inputs(posts), grpc_inputs()] * 2
        + [http_inputs(answers), grpc_inputs()] * 2
    )


@st.composite
def _chosen(draw: st.DrawFn, among: Sequence[st.SearchStrategy[Input]]) -> Input:
    return draw(among[draw(st.integers(0, len(among) - 1))])
