"""Checks large gRPC messages in helper processes before the router parses them.

The parser of protobuf holds Python's interpreter lock, for longest if a message contains many small
messages. Therefore a helper process parses large messages first. The router gets a message without
its unknown fields, and only if its lists are within the bounds.
"""

import json
from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError, Message

from penstock.common.structured_outputs import NAME
from penstock.protos import inference_pb2 as pb
from penstock.router.api.grpc_chat import chat_sizes, check_chat
from penstock.router.api.grpc_codec import call_sizes, structured_outputs
from penstock.router.config import RequestBounds
from penstock.router.errors import invalid
from penstock.router.requests.cost_limits import (
    CallSizes,
    check_num_detokenized,
    check_num_tokens,
    check_sizes,
)
from penstock.router.requests.request import ModelLimits, check_prompt_length, check_vocabulary
from penstock.router.requests.structured_check import check_form

GRPC_KIND = "grpc"
"""Name of the job that checks a message."""

KINDS: Mapping[str, type[Message]] = {
    kind.DESCRIPTOR.full_name: kind
    for kind in (pb.GenerateRequest, pb.TokenizeRequest, pb.DetokenizeRequest)
}
"""The types of messages that may be larger than `INLINE_BYTES`, by full name."""


def job_items(kind: type[Message], data: bytes, model: ModelLimits) -> list[bytes]:
    """Return the items of the job that checks a serialized message."""
    head = [kind.DESCRIPTOR.full_name, model.name, model.max_model_len, model.vocab_size]
    return [json.dumps(head).encode(), data]


def check_job(bounds: RequestBounds, items: Sequence[bytes]) -> list[bytes]:
    """Check the message of a job; return it serialized, without unknown fields.

    Raises:
        ServingError: INVALID if the message is malformed, or one of its lists is not allowed.
    """
    name, *model = json.loads(items[0])
    try:
        message = KINDS[name].FromString(items[1])
    except DecodeError:
        raise invalid(f"the message is not a valid {name}: send a message of this type") from None
    check_message(message, bounds, ModelLimits(*model))
    message.DiscardUnknownFields()
    return [message.SerializeToString()]


def check_message(message: Message, bounds: RequestBounds, model: ModelLimits) -> None:
    """Refuse a message with a list or a constraint that is too long, or with unknown tokens."""
    match message:
        case pb.GenerateRequest():
            check_generate(message, bounds, model)
            if (wanted := structured_outputs(message.sampling)) is not None:
                check_form(wanted, NAME)
            check_chat(message.chat, bounds)
        case pb.TokenizeRequest():
            check_sizes(CallSizes(**chat_sizes(message.chat)), bounds)
            check_chat(message.chat, bounds)
        case pb.DetokenizeRequest():
            check_tokens(message, bounds, model)


def check_generate(request: pb.GenerateRequest, bounds: RequestBounds, model: ModelLimits) -> None:
    """Refuse a request for an answer if one of its lists is too long."""
    check_sizes(call_sizes(request), bounds)
    check_num_tokens("allowed_token_ids", len(request.sampling.allowed_tokens), model.vocab_size)
    for known in request.resume_from:
        check_num_tokens("resume_from", len(known.tokens), model.max_model_len)
    check_prompt_length(len(request.tokens.ids), model)


def check_tokens(request: pb.DetokenizeRequest, bounds: RequestBounds, model: ModelLimits) -> None:
    """Refuse too many tokens, and tokens outside the vocabulary."""
    check_num_detokenized(len(request.tokens), model, bounds)
    tokens = request.tokens[:]  # a list, which is read in half the time of the message's field
    check_vocabulary(tokens, model, "tokens")
