"""Rendezvous of a worker's ranks: a key-value store in rank 0, served over gRPC.

Communicators find each other through this store, and ranks agree on common settings. Calls must
carry the cluster's token.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import grpc
from torch._C._distributed_c10d import Store

from penstock.protos import ranks_pb2 as wire
from penstock.protos import ranks_pb2_grpc
from penstock.protos.serving.authorization import (
    Authorize,
    CallMetadata,
    ThreadedAuthInterceptor,
    check_secret,
)
from penstock.protos.serving.connection_guard import ConnectionGuard
from penstock.protos.serving.port_limits import PortLimits, server_options
from penstock.protos.serving.refused_connections import RefusedConnections
from penstock.workers.parallel.collectives import RankLost

MAX_BYTES = 1 << 16  # maximum size of a message
MAX_ENTRIES = 1 << 14
_POLL_SECONDS = 1.0  # maximum time that one `Get` call waits for a key
_LIMITS = PortLimits(
    max_message_bytes=MAX_BYTES,
    max_metadata_bytes=16 << 10,
    max_connections=1024,
    max_connections_per_address=256,
    max_calls=64,
    handshake_seconds=10.0,
    idle_seconds=60.0,
)
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", MAX_BYTES),)
_WAIT_SECONDS = 3600.0  # default timeout for a key: the other rank may still be loading weights


class LocalStore(Store):
    """The rendezvous store in rank 0's memory, with the methods that communicators call."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = ""

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            if key not in self._values and len(self._values) >= MAX_ENTRIES:
                raise ValueError(
                    f"the store of the ranks' rendezvous has {MAX_ENTRIES} entries, the maximum"
                )
            self._values[key] = data
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = _WAIT_SECONDS if timeout is None else timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.check(keys), seconds)
            if not self.check(keys):
                reason = self._closed or f"another rank did not set {', '.join(keys)} in time"
                raise RankLost(reason)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def close(self, reason: str) -> None:
        """Close the store: current and later waits raise `RankLost(reason)`."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()


class RendezvousServer(ranks_pb2_grpc.RendezvousServicer):
    """gRPC server of rank 0's store. Raises OSError if it cannot listen on `host`.

    Other ranks connect to `address`.
    """

    def __init__(self, host: str, token: str | None, num_ranks: int) -> None:
        self.store = LocalStore()
        # Each rank may wait for keys in two threads at once.
        threads = ThreadPoolExecutor(4 * num_ranks, thread_name_prefix="meeting")
        self._server = grpc.server(
            threads,
            interceptors=[ThreadedAuthInterceptor(_authorizer(token))],
            options=server_options(_LIMITS),
        )
        ranks_pb2_grpc.add_RendezvousServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        shown = f"[{host}]" if ":" in host else host
        try:
            port = self._server.add_insecure_port(f"{shown}:0")
        except RuntimeError:
            raise OSError(
                f"cannot serve the ranks' rendezvous at {host}, which is not an address of this "
                "machine: set host to an address of this machine"
            ) from None
        self.address = f"{shown}:{port}"
        self._server.start()
        self._guard = ConnectionGuard(
            port, _LIMITS.max_connections_per_address, RefusedConnections("rendezvous")
        )

    def Put(self, request: wire.Entry, context: grpc.ServicerContext) -> wire.Entry:
        try:
            self.store.set(request.key, request.value)
        except ValueError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return wire.Entry()

    def Get(self, request: wire.Key, context: grpc.ServicerContext) -> wire.Entry:
        try:
            self.store.wait([request.key], timedelta(seconds=_POLL_SECONDS))
        except RankLost as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        return wire.Entry(key=request.key, value=self.store.get(request.key))

    def close(self) -> None:
        """Stop the server and close the store."""
        self._guard.close()
        self.store.close("rank 0 has stopped")
        self._server.stop(0)


class RemoteStore(Store):
    """Client of rank 0's store, for other ranks. Raises `RankLost` if rank 0 does not answer."""

    def __init__(self, address: str, token: str | None) -> None:
        super().__init__()
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = ranks_pb2_grpc.RendezvousStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call(lambda: self._stub.Put(wire.Entry(key=key, value=data), metadata=self._metadata))

    def get(self, key: str) -> bytes:
        found = self._get(key, _WAIT_SECONDS)
        if found is None:
            raise RankLost(f"another rank did not set {key} within {_WAIT_SECONDS:g} s")
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = _WAIT_SECONDS if timeout is None else timeout.total_seconds()
        for key in keys:
            if self._get(key, seconds) is None:
                raise RankLost(f"another rank did not set {key} within {seconds:g} s")

    def check(self, keys: list[str]) -> bool:
        return all(self._get(key, 0.0) is not None for key in keys)

    def close(self) -> None:
        self._channel.close()

    def _get(self, key: str, seconds: float) -> bytes | None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                entry = self._stub.Get(wire.Key(key=key), metadata=self._metadata, timeout=10.0)
                return bytes(entry.value)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise RankLost(f"rendezvous with rank 0 failed: {error.details()}") from None
            if time.monotonic() >= deadline:
                return None

    def _call(self, call: "grpc.UnaryUnaryMultiCallable") -> None:
        try:
            call()
        except grpc.RpcError as error:
            raise RankLost(f"rendezvous with rank 0 failed: {error.details()}") from None


def _authorizer(token: str | None) -> Authorize:
    def authorize(method: str, metadata: CallMetadata) -> None:
        refusal = "wrong or missing cluster token: start all ranks with the same token"
        check_secret(metadata, token, refusal)

    return authorize
