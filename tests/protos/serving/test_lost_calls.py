"""gRPC's error records are dropped for calls that end before their reply is sent."""

import logging

import pytest
from grpc._cython import cygrpc

from penstock.protos.serving.call_handlers import CallHandlers
from penstock.protos.serving.lost_calls import GRPC_LOGGER


@pytest.mark.parametrize(
    ("error", "levels"),
    [
        (cygrpc.ExecuteBatchError('Failed "execute_batch": (<Operation>,)'), [logging.DEBUG]),
        (cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 8"), [logging.ERROR]),
        (cygrpc.InternalError("Error in grpc_server_request_call"), [logging.ERROR]),
        (ValueError('Failed "execute_batch"'), [logging.ERROR]),
        (None, [logging.ERROR]),
    ],
)
def test_a_reply_that_cannot_be_sent_is_no_error(
    caplog: pytest.LogCaptureFixture, error: Exception | None, levels: list[int]
) -> None:
    CallHandlers(1.0)
    CallHandlers(1.0)  # must not add the log filter a second time
    with caplog.at_level(logging.DEBUG):
        logging.getLogger(GRPC_LOGGER).error("raised by method [%s]", "x", exc_info=error)
    assert [record.levelno for record in caplog.records] == levels


def test_grpc_logs_under_this_name() -> None:
    assert cygrpc._LOGGER.name == GRPC_LOGGER
