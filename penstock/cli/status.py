"""Show the state of a cluster as tables or as JSON."""

import argparse
import http.client
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import SplitResult, urlsplit

from rich.console import Console
from rich.live import Live

from penstock.cli.client_key import add_key_file
from penstock.cli.flags import Parser
from penstock.cli.status_view import page
from penstock.common.api_key import VARIABLE, client_key

Json: TypeAlias = dict[str, Any]

DEFAULT = "http://127.0.0.1:8001"
SECONDS_TO_ANSWER = 5.0
MAX_BYTES = 16 << 20
TRIES = 5  # with --watch, the command gives up after this many failures in a row


class NoStatus(RuntimeError):
    """The router did not return a status. The message has only one line."""


def main(arguments: Sequence[str]) -> int:
    """Run the command. Return 1 if there is no status, and 2 if the URL is invalid."""
    given = _parser().parse_args(arguments)
    try:
        key = client_key(given.api_key_file)
        if given.watch and not given.json:
            watch(given.url, key, given.watch)
            return 0
        status = fetch(given.url, key)
        if given.json:
            print(json.dumps(status, indent=2))
        else:
            Console(highlight=False).print(page(status, given.url, time.time()))
    except ValueError as error:
        print(f"penstock status: {error}", file=sys.stderr)
        return 2
    except NoStatus as error:
        print(f"penstock status: {given.url}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0 if given.watch else 130
    return 0


def watch(url: str, key: str | None, seconds: float) -> None:
    """Show the status every `seconds` seconds until Ctrl-C.

    Raises:
        NoStatus: `TRIES` requests in a row have failed.
    """
    missed = 0
    status = fetch(url, key)
    with Live(console=Console(highlight=False), auto_refresh=False, screen=False) as live:
        while True:
            live.update(page(status, url, time.time()), refresh=True)
            time.sleep(seconds)
            try:
                status, missed = fetch(url, key), 0
            except NoStatus:
                missed += 1
                if missed == TRIES:
                    raise


def fetch(url: str, key: str | None = None) -> Json:
    """Return the status of a router.

    Raises:
        NoStatus: the router returned no status. The message gives the reason.
        ValueError: the URL is invalid.
    """
    connection, path = connect(url)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request("GET", f"{path}/status", headers=headers)
        reply = connection.getresponse()
        body = reply.read(MAX_BYTES)
    except TimeoutError:
        raise NoStatus(
            f"the router at {connection.host} port {connection.port} gave no answer within "
            f"{SECONDS_TO_ANSWER:g} s: try again"
        ) from None
    except OSError as error:
        raise NoStatus(
            f"cannot reach a router at {connection.host} port {connection.port} "
            f"({error.strerror or error}): start a server with `penstock serve`, or give the "
            "address of the router's operators' port"
        ) from None
    except http.client.HTTPException:
        raise NoStatus(
            f"the server at {connection.host} port {connection.port} is not an HTTP server: give "
            "the URL of the operators' port"
        ) from None
    finally:
        connection.close()
    return _read(reply.status, body)


def connect(url: str, timeout: float = SECONDS_TO_ANSWER) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection to the host of `url`, and the path of `url` without a final slash.

    The connection is not open yet.

    Raises:
        ValueError: the URL is invalid.
    """
    where = _split(url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    connection = kind(where.hostname or "", where.port, timeout=timeout)
    return connection, where.path.rstrip("/")


def _split(url: str) -> SplitResult:
    where = urlsplit(url if "://" in url else f"http://{url}")
    good = where.scheme in ("http", "https") and where.hostname and url.isprintable()
    try:
        good = good and " " not in url and where.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"invalid URL {url!r}: expected a URL like {DEFAULT}")
    return where


def _read(code: int, body: bytes) -> Json:
    if code == 401:
        raise NoStatus(f"the server needs a valid API key: give --api-key-file or {VARIABLE}")
    if code == 403:
        raise NoStatus(
            "the server refused access (HTTP 403): give an API key with the role 'operator' or "
            "'metrics'; if the server listens only on loopback, use a URL with the host localhost"
        )
    try:
        status = json.loads(body) if code == 200 else None
    except ValueError:
        status = None
    if not isinstance(status, dict) or not {"model", "pools", "workers"} <= status.keys():
        raise NoStatus(
            f"the server at this URL (HTTP {code}) is not the operators' port of a Penstock router "
            "of this version: check the port and the versions"
        )
    return status


def _parser() -> Parser:
    parser = Parser(prog="penstock status", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "url",
        nargs="?",
        default=DEFAULT,
        metavar="URL",
        help=f"URL of the operators' port ({DEFAULT})",
    )
    add_key_file(parser)
    parser.add_argument("--json", action="store_true", help="print the whole status as JSON")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=1.0,
        metavar="SECONDS",
        help="refresh every SECONDS (1) until Ctrl-C",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, not {text[:40]!r}")
    return seconds
