"""Limits on the clients of a gRPC port, as options of the server."""

from dataclasses import dataclass

_OPTION_MAX = 2**31 - 1  # the options of gRPC are 32-bit integers


@dataclass(frozen=True, slots=True)
class PortLimits:
    """Limits on the clients of one port. The limits also apply to unauthorized calls.

    If a call or a connection exceeds a limit, gRPC ends that call or closes that connection. Other
    connections are not affected.
    """

    max_message_bytes: int
    max_metadata_bytes: int  # largest size of the metadata of one call
    max_connections: int
    # Largest number of connections of one address, or 0 for no limit. A `ConnectionGuard` closes
    # the connections beyond this number.
    max_connections_per_address: int
    max_calls: int  # largest number of open calls of one connection
    handshake_seconds: float  # time limit for the first HTTP/2 frames of a connection
    idle_seconds: float  # a connection that has had no calls for this long is closed
    # Age at which a connection must be replaced by a new one, or None for no limit.
    age_seconds: float | None = None
    # After a connection has reached that age, its calls have this much time until they are ended.
    age_grace_seconds: float = 0.0


def server_options(limits: PortLimits) -> list[tuple[str, int]]:
    """Return the options of a server whose port has these limits."""
    options = [
        ("grpc.so_reuseport", 0),  # fail if another process listens on the port
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.max_concurrent_streams", limits.max_calls),
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.handshake_seconds)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.idle_seconds)),
        # A client may send a ping every 10 s. The connection is closed at its third early ping.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 2),
        # Ping a client after 60 s without data. Close the connection if the client does not answer
        # within 20 s, because its machine may be lost.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
    if limits.age_seconds is not None:
        options += [
            ("grpc.max_connection_age_ms", _milliseconds(limits.age_seconds)),
            ("grpc.max_connection_age_grace_ms", _milliseconds(limits.age_grace_seconds)),
        ]
    return options


def _milliseconds(seconds: float) -> int:
    return min(round(seconds * 1000), _OPTION_MAX)
