"""`penstock serve` needs no network: it starts and answers where only loopback exists."""

import subprocess
import sys

import pytest

from tests.support.serving import TIMEOUT_SECONDS
from tests.support.without_network import NAMESPACE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_server_starts_and_answers_without_a_network() -> None:
    if subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("this machine does not allow network namespaces of users")
    command = [*NAMESPACE, sys.executable, "-m", "tests.support.without_network"]
    ran = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=2 * TIMEOUT_SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    assert "4" in ran.stdout
