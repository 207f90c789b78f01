"""Limits of a server's HTTP connections, and the numbers of its open connections."""

from collections import Counter
from collections.abc import Callable

from penstock.protos.serving.refused_connections import RefusedConnections, client_network
from penstock.router.api.write_batch import WriteBatch
from penstock.router.config import ConnectionBounds, RequestBounds
from penstock.router.requests.call_pacer import CallPacer


class ConnectionLimits:
    """Limits of a server's connections, and the numbers of its open connections.

    Args:
        requests: limits on the size and time of a request's head.
        bounds: limits on times and numbers of connections.
        on_malformed: called for each request that is not valid HTTP.
        refused: counts the connections that exceed the limits.
    """

    def __init__(
        self,
        requests: RequestBounds,
        bounds: ConnectionBounds,
        on_malformed: Callable[[], None] = lambda: None,
        refused: RefusedConnections | None = None,
    ) -> None:
        self.max_head_bytes = requests.max_header_bytes
        self.receive_seconds = requests.receive_seconds
        self.bounds = bounds
        self.on_malformed = on_malformed
        self._refused = refused or RefusedConnections("HTTP")
        self._max_per_network = bounds.max_connections_per_address or bounds.max_connections
        self.pacer = CallPacer()
        self.batch = WriteBatch()
        self._num_open = 0
        self._num_by_network: Counter[str] = Counter()

    def open(self, address: str) -> bool:
        """Count a new connection; return whether it is within the limits."""
        network = client_network(address)
        self._num_open += 1
        self._num_by_network[network] += 1
        is_within = (
            self._num_open <= self.bounds.max_connections
            and self._num_by_network[network] <= self._max_per_network
        )
        if not is_within:
            self._refused.add(network)
        return is_within

    def close(self, address: str) -> None:
        """Stop counting a connection that `open` has counted."""
        network = client_network(address)
        self._num_open -= 1
        self._num_by_network[network] -= 1
        if not self._num_by_network[network]:
            del self._num_by_network[network]
