"""Host process of one router, which prints a description and runs until stdin is closed.

Runs as `python host.py ADAPTER OPTIONS` under the router's own interpreter, and therefore imports
only the standard library. An adapter is a module in this folder with

    router(options): a context manager that starts the router and yields a description of it

The description contains versions and settings, for the report. `options` holds:

    stub: where the OpenAI stub listens, as host:port
    address: where the router must listen, as host:port
    second_port: another free port, for metrics
    key: the API key that clients send
    further keys: the settings of the router, from `routers.py`
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0


@contextlib.contextmanager
def running(
    command: Sequence[str], ready_url: str, variables: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server while the context is active.

    The context begins when the server answers at `ready_url`. Raises RuntimeError if the server
    does not answer.
    """
    process = subprocess.Popen(command, env={**os.environ, **(variables or {})})
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(ready_url):
            if process.poll() is not None or time.monotonic() > deadline:
                what = f"did not answer within {_START_SECONDS:g} s"
                if process.poll() is not None:
                    what = f"exited with code {process.poll()} before it answered"
                raise RuntimeError(f"{' '.join(command)} {what} at {ready_url}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    """Run the router until stdin is closed."""
    adapter, options = sys.argv[1], json.loads(sys.argv[2])
    # The router's own output goes to stderr, so that the real stdout has only the description.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with importlib.import_module(adapter).router(options) as about:
        print(json.dumps(about), file=replies, flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    # Adapters import `running` from the module "host".
    sys.modules["host"] = sys.modules["__main__"]
    sys.exit(main())
