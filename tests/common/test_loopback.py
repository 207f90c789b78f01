"""Addresses that only the same machine can reach."""

import pytest

from penstock.common.loopback import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.8.7", "::1"])
def test_loopback_addresses_are_recognized(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "127.example.com", "127.0.0.1x"])
def test_other_addresses_and_names_count_as_reachable(host: str) -> None:
    assert not is_loopback(host)
