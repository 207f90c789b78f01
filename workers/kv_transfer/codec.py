"""Conversion between the records of the KV transfer protocol and protobuf messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.workers.kv_transfer.protocol.messages import (
    Credit,
    End,
    Header,
    Moved,
    Outcome,
    PairKey,
    Piece,
)
from penstock.workers.kv_transfer.shards import LayerHeadRange, Shard
from penstock.workers.parallel.lazy_module import LazyModule
from penstock.workers.scheduling.sequence import Ints

if TYPE_CHECKING:
    from penstock.protos import ranks_pb2, transfer_pb2
else:
    ranks_pb2 = LazyModule("penstock.protos.ranks_pb2")
    transfer_pb2 = LazyModule("penstock.protos.transfer_pb2")


# ---------------------------------------------------------------- control channel


def encode_from_source(message: Header | End) -> transfer_pb2.FromSource:
    match message:
        case Header():
            return transfer_pb2.FromSource(header=_header(message))
        case End():
            end = transfer_pb2.End(
                epoch=message.epoch, aborted=message.aborted, messages=message.num_messages
            )
            return transfer_pb2.FromSource(end=end)


def _header(header: Header) -> transfer_pb2.Header:
    rectangle = header.shard.rectangle
    return transfer_pb2.Header(
        router=header.router,
        request=header.request,
        attempt=header.attempt,
        epoch=header.epoch,
        index=header.index,
        start=header.shard.start,
        stop=header.shard.stop,
        first_layer=rectangle.first_layer,
        last_layer=rectangle.last_layer,
        first_head=rectangle.first_head,
        last_head=rectangle.last_head,
        bytes=header.num_bytes,
        source_rank=header.pair[0],
        destination_rank=header.pair[1],
    )


def decode_header(header: transfer_pb2.Header) -> Header:
    return Header(
        header.router,
        header.request,
        header.attempt,
        header.epoch,
        header.index,
        (header.source_rank, header.destination_rank),
        shard_of(header),
        header.bytes,
    )


def decode_end(end: transfer_pb2.End) -> End:
    return End(end.epoch, end.messages, end.aborted)


def encode_from_destination(message: Credit | Outcome) -> transfer_pb2.FromDestination:
    match message:
        case Credit(epoch, index, discard):
            credit = transfer_pb2.Credit(epoch=epoch, index=index, discard=discard)
            return transfer_pb2.FromDestination(credit=credit)
        case Outcome(epoch, reason):
            outcome = transfer_pb2.Outcome(epoch=epoch, received=not reason, reason=reason)
            return transfer_pb2.FromDestination(outcome=outcome)


def decode_credit(credit: transfer_pb2.Credit) -> Credit:
    return Credit(credit.epoch, credit.index, credit.discard)


def decode_outcome(outcome: transfer_pb2.Outcome) -> Outcome:
    failed = outcome.reason or "the destination gave no reason"
    return Outcome(outcome.epoch, "" if outcome.received else failed)


def store_value(pair: PairKey, value: ranks_pb2.Value) -> transfer_pb2.StoreValue:
    """Convert a rank's store entry to the message for the peer worker."""
    source, destination = pair
    return transfer_pb2.StoreValue(
        key=value.key, value=value.value, source_rank=source, destination_rank=destination
    )


def holdings(rectangles: Sequence[LayerHeadRange]) -> list[transfer_pb2.Holding]:
    """Convert the layers and heads of each rank into the form that is sent to peers."""
    return [
        transfer_pb2.Holding(
            first_layer=each.first_layer,
            last_layer=each.last_layer,
            first_head=each.first_head,
            last_head=each.last_head,
        )
        for each in rectangles
    ]


# ---------------------------------------------------------------- orders and reports of ranks


def encode_piece(piece: Piece) -> ranks_pb2.Piece:
    rectangle = piece.shard.rectangle
    return ranks_pb2.Piece(
        epoch=piece.epoch,
        index=piece.index,
        blocks=np.ascontiguousarray(piece.blocks, np.dtype("<i4")).tobytes(),
        start=piece.shard.start,
        stop=piece.shard.stop,
        first_layer=rectangle.first_layer,
        last_layer=rectangle.last_layer,
        first_head=rectangle.first_head,
        last_head=rectangle.last_head,
        unit=piece.unit,
    )


def decode_moved(outcome: ranks_pb2.Outcome) -> Moved:
    return Moved(outcome.epoch, outcome.index, outcome.bytes, outcome.problem, outcome.broken)


def blocks_in(piece: ranks_pb2.Piece) -> Ints:
    return np.frombuffer(piece.blocks, np.dtype("<i4")).copy()


def shard_of(message: ranks_pb2.Piece | transfer_pb2.Header) -> Shard:
    return Shard(rectangle_of(message), message.start, message.stop)


def rectangle_of(
    message: ranks_pb2.Piece | transfer_pb2.Header | transfer_pb2.Holding,
) -> LayerHeadRange:
    return LayerHeadRange(
        message.first_layer, message.last_layer, message.first_head, message.last_head
    )
