"""Change the role of a worker while it runs."""

import http.client
import json
import sys
from collections.abc import Sequence

from penstock.cli.client_key import add_key_file
from penstock.cli.flags import Parser
from penstock.cli.status import DEFAULT, MAX_BYTES, NoStatus, connect
from penstock.common.api_key import client_key

ROLES = ("prefill", "decode", "mixed")
# Seconds to wait for the router's reply. The router itself waits for the supervisor, but for a
# shorter time.
SECONDS_TO_ANSWER = 30.0


def main(arguments: Sequence[str]) -> int:
    """Run the command. Return 1 if no router confirmed the change, and 2 if the URL is invalid."""
    given = _parser().parse_args(arguments)
    try:
        change(given.url, client_key(given.api_key_file), given.worker, given.role)
    except ValueError as error:
        print(f"penstock role: {error}", file=sys.stderr)
        return 2
    except NoStatus as error:
        print(f"penstock role: {given.url}: {error}", file=sys.stderr)
        return 1
    print(f"{given.worker} is now a {given.role} worker")
    return 0


def change(url: str, key: str, worker: str, role: str) -> None:
    """Change the role of a worker through a router.

    Raises:
        NoStatus: no router confirmed the change. The message gives the reason.
        ValueError: the URL is invalid.
    """
    connection, path = connect(url, SECONDS_TO_ANSWER)
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    body = json.dumps({"worker": worker, "role": role})
    try:
        connection.request("POST", f"{path}/role", body, headers)
        reply = connection.getresponse()
        content = reply.read(MAX_BYTES)
    except TimeoutError:
        raise NoStatus(
            f"the router at {connection.host} port {connection.port} gave no answer within "
            f"{SECONDS_TO_ANSWER:g} s, so the role may or may not have changed: check it with "
            "`penstock status`"
        ) from None
    except OSError as error:
        raise NoStatus(
            f"cannot reach a router at {connection.host} port {connection.port} "
            f"({error.strerror or error}): give the URL of a router's operators' port"
        ) from None
    except http.client.HTTPException:
        raise NoStatus(
            f"the server at {connection.host} port {connection.port} is not an HTTP server: give "
            "the URL of a router's operators' port"
        ) from None
    finally:
        connection.close()
    if reply.status != 200:
        raise NoStatus(_reason(reply.status, content))


def _reason(code: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "the server at this URL is not a Penstock router of this version"
    return f"{message} (HTTP {code})"


def _parser() -> Parser:
    parser = Parser(
        prog="penstock role",
        description=__doc__,
        epilog="Running requests continue. The worker keeps the role when its process is replaced, "
        "until the role is changed again or the cluster ends.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "worker", metavar="WORKER", help="name of the worker, as shown by penstock status"
    )
    parser.add_argument("role", choices=ROLES, metavar="ROLE", help=", ".join(ROLES))
    parser.add_argument(
        "url",
        nargs="?",
        default=DEFAULT,
        metavar="URL",
        help=f"URL of the operators' port ({DEFAULT})",
    )
    add_key_file(parser)
    return parser
