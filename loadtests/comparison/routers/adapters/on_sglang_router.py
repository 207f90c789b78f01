"""Adapter for sglang-router with its defaults, in front of one HTTP worker."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from host import running


@contextlib.contextmanager
def router(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the router and yield its version."""
    host, port = options["address"].split(":")
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--log-level", "warn"),
        *("--host", host, "--port", port, "--worker-urls", f"http://{options['stub']}"),
        *("--prometheus-host", host, "--prometheus-port", str(options["second_port"])),
    ]
    with running(command, f"http://{options['address']}/readiness"):
        yield {"sglang-router": version("sglang-router")}
