"""Counts and logs the connections that a port refuses."""

import logging
import time
from ipaddress import IPv6Address
from math import inf

LOG_SECONDS = 60.0
"""Shortest time between two log records of one port."""

log = logging.getLogger(__name__)


def client_network(address: str) -> str:
    """Return the part of an IP address that identifies a client.

    For an IPv4 address, the result is the whole address. For an IPv6 address, the result is the
    network of its first 64 bits, because one client can usually use all addresses of such a
    network.
    """
    if ":" not in address:
        return address
    try:
        ip = IPv6Address(address)
    except ValueError:
        return address
    if ip.ipv4_mapped is not None:  # an IPv4 client of a port that listens on IPv6
        return str(ip.ipv4_mapped)
    return f"{IPv6Address(int(ip) >> 64 << 64)}/64"


class RefusedConnections:
    """Counts the connections that a port has refused, and logs them at most once a minute.

    Args:
        port_name: name of the port in log records.
    """

    def __init__(self, port_name: str) -> None:
        self.total = 0
        self._port_name = port_name
        self._num_logged = 0
        self._logged_at = -inf

    def add(self, network: str) -> None:
        """Count a refused connection from `network`. Always call this in the same thread."""
        self.total += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            log.warning(
                "%s port: %d connections refused, because too many are open (the last one from %s)",
                self._port_name,
                self.total - self._num_logged,
                network,
            )
            self._num_logged, self._logged_at = self.total, now
