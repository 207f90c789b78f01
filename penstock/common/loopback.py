"""Recognizes listen addresses that can be reached only from the same machine."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on `host` can be reached only from its own machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
