"""`penstock role`: gives a worker of a served cluster another role while it runs."""

import http.client
import json
import sys
from collections.abc import Sequence

from penstock.cli.flags import Parser
from penstock.cli.status import DEFAULT, MAX_BYTES, NoStatus, connect

ROLES = ("prefill", "decode", "mixed")
SECONDS_TO_ANSWER = 30.0  # longer than a router waits for its supervisor to record the role


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 where it was not done, 2 where the address is none."""
    given = _parser().parse_args(arguments)
    try:
        change(given.url, given.api_key, given.worker, given.role)
    except ValueError as error:
        print(f"penstock role: {error}", file=sys.stderr)
        return 2
    except NoStatus as error:
        print(f"penstock role: {given.url}: {error}", file=sys.stderr)
        return 1
    print(f"{given.worker} is a {given.role} worker now")
    return 0


def change(url: str, key: str | None, worker: str, role: str) -> None:
    """Ask a router for it. `NoStatus`, with the reason; ValueError for what is no address."""
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
        raise NoStatus(f"no answer within {SECONDS_TO_ANSWER:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise NoStatus(f"nothing of ours answers there ({error})") from None
    finally:
        connection.close()
    if reply.status != 200:
        raise NoStatus(_reason(reply.status, content))


def _reason(code: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "what answers there is no Penstock router of this version"
    return f"{message} ({code})"


def _parser() -> Parser:
    parser = Parser(
        prog="penstock role",
        description=__doc__,
        epilog="What it runs goes on. It keeps the role when its process is replaced, until it is "
        "given another one or the cluster ends.",
        allow_abbrev=False,
    )
    parser.add_argument("worker", metavar="WORKER", help="as penstock status names it")
    parser.add_argument("role", choices=ROLES, metavar="ROLE", help=", ".join(ROLES))
    parser.add_argument(
        "url", nargs="?", default=DEFAULT, metavar="URL", help=f"of the HTTP port ({DEFAULT})"
    )
    parser.add_argument("--api-key", metavar="TEXT", help="an operator's: it begins with admin-")
    return parser
