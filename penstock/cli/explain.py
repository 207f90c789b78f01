"""Explain on which workers a request ran, for which reason, and where its time went."""

import http.client
import json
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import quote

from rich.console import Console

from penstock.cli.client_key import add_key_file
from penstock.cli.explain_view import timeline
from penstock.cli.flags import Parser
from penstock.cli.status import MAX_BYTES, connect
from penstock.common.api_key import client_key

Json: TypeAlias = dict[str, Any]

DEFAULT = "http://127.0.0.1:8000"
# Seconds to wait for the reply. It is long, because the router may have to query other routers.
SECONDS_TO_ANSWER = 10.0


class NoExplanation(RuntimeError):
    """The router did not return an explanation. The message has only one line."""


def main(arguments: Sequence[str]) -> int:
    """Run the command. Return 1 if there is no explanation, and 2 if the URL is invalid."""
    # With `parse_args`, the optional URL would not be accepted after an option.
    given = _parser().parse_intermixed_args(arguments)
    try:
        found = fetch(given.url, given.id, client_key(given.api_key_file))
    except ValueError as error:
        print(f"penstock explain: {error}", file=sys.stderr)
        return 2
    except NoExplanation as error:
        print(f"penstock explain: {given.url}: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        Console(highlight=False).print(timeline(found))
    return 0


def fetch(url: str, request_id: str, key: str = "") -> Json:
    """Return the explanation of a request as JSON.

    Raises:
        NoExplanation: the router returned no explanation. The message gives the reason.
        ValueError: the URL is invalid.
    """
    connection, path = connect(url, SECONDS_TO_ANSWER)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request(
            "GET", f"{path}/v1/requests/{quote(request_id, safe='')}/explain", headers=headers
        )
        reply = connection.getresponse()
        body = reply.read(MAX_BYTES)
    except TimeoutError:
        raise NoExplanation(
            f"the router at {connection.host} port {connection.port} gave no answer within "
            f"{SECONDS_TO_ANSWER:g} s: try again"
        ) from None
    except OSError as error:
        raise NoExplanation(
            f"cannot reach a router at {connection.host} port {connection.port} "
            f"({error.strerror or error}): check the URL, and that `penstock serve` runs"
        ) from None
    except http.client.HTTPException:
        raise NoExplanation(
            f"the server at {connection.host} port {connection.port} is not an HTTP server: give "
            "the URL of the router's HTTP port"
        ) from None
    finally:
        connection.close()
    return _read(reply.status, body)


def _read(code: int, body: bytes) -> Json:
    try:
        content = json.loads(body)
        if code == 200:
            content["requests"]
            return dict(content)
        message = content["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "the server at this URL is not a Penstock router of this version"
    raise NoExplanation(f"{message} (HTTP {code})")


def _parser() -> Parser:
    parser = Parser(
        prog="penstock explain",
        description=__doc__,
        epilog="A router keeps the explanations of its latest 1024 requests. Any router finds the "
        "one that has them. An operator's key finds the requests of all keys.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "id", metavar="ID", help="request id: the header x-request-id of the response"
    )
    parser.add_argument(
        "url",
        nargs="?",
        default=DEFAULT,
        metavar="URL",
        help=f"URL of a router's port, for clients or for operators ({DEFAULT})",
    )
    add_key_file(parser)
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")
    return parser
