"""Counts and log records of refused connections."""

import logging
from types import SimpleNamespace

import pytest

from penstock.protos.serving import refused_connections
from penstock.protos.serving.refused_connections import RefusedConnections, client_network


@pytest.mark.parametrize(
    ("addresses", "network"),
    [
        (("192.0.2.1", "::ffff:192.0.2.1", "::ffff:c000:201"), "192.0.2.1"),
        (("2001:db8:1:2::1", "2001:db8:1:2:ffff:ffff:ffff:ffff"), "2001:db8:1:2::/64"),
        (("2001:db8:1:3::1",), "2001:db8:1:3::/64"),
        (("fe80::1%eth0",), "fe80::/64"),
        (("",), ""),
    ],
)
def test_addresses_of_one_client_have_the_same_network(
    addresses: tuple[str, ...], network: str
) -> None:
    assert {client_network(each) for each in addresses} == {network}


def test_refusals_are_counted_and_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(refused_connections, "time", clock)
    refused = RefusedConnections("gRPC")
    for number in range(5):
        refused.add(f"192.0.2.{number}")
        now += 59.9 / 4
    now += 0.2
    refused.add("192.0.2.9")
    assert refused.total == 6
    assert [each.getMessage() for each in caplog.records] == [
        f"gRPC port: {text}"
        for text in (
            "1 connections refused, because too many are open (the last one from 192.0.2.0)",
            "5 connections refused, because too many are open (the last one from 192.0.2.9)",
        )
    ]
