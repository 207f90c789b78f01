"""The program of the fork server and of its helper processes, with the handlers of all jobs.

`python -m penstock.router.helpers.main DESCRIPTOR` runs the fork server, which receives requests
for helper processes at the socket with this file descriptor.
"""

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

from penstock.common.text.chat_renderer import ChatRenderer
from penstock.router.api.generation.parsed_body import BODY_KIND, parse_job
from penstock.router.api.grpc_check import GRPC_KIND, check_job
from penstock.router.errors import invalid
from penstock.router.helpers.fork_server import serve_forks
from penstock.router.helpers.limits import end_with_parent
from penstock.router.helpers.serving import Work, serve_jobs
from penstock.router.helpers.settings import HelperSettings
from penstock.router.requests.chat_rendering import KIND as CHAT_KIND
from penstock.router.requests.render_job import render_job
from penstock.router.requests.structured_check import KIND as STRUCTURED_KIND
from penstock.router.requests.structured_job import structured_job


def set_up(settings: HelperSettings) -> tuple[Work, list[bytes]]:
    """Return the function that does jobs, and the items of the first reply.

    The only item is a JSON list of the variables that the chat template reads.

    Raises:
        ServingError: INVALID if the chat template is not valid.
    """
    renderer: ChatRenderer | None = None
    if settings.chat is not None:
        try:
            renderer = ChatRenderer(settings.chat)
        except ValueError as error:
            raise invalid(str(error)) from error

    def work(items: Sequence[bytes]) -> list[bytes]:
        kind, *rest = items
        match kind.decode():
            case name if name == CHAT_KIND:
                return render_job(renderer, rest)
            case name if name == BODY_KIND:
                return parse_job(settings.bounds, rest)
            case name if name == GRPC_KIND:
                return check_job(settings.bounds, rest)
            case name if name == STRUCTURED_KIND:
                return structured_job(rest)
        raise ValueError(f"there is no job of kind {kind!r}")

    variables = renderer.variables if renderer is not None else ()
    return work, [json.dumps(sorted(variables)).encode()]


def main() -> int:
    """Run the fork server and, in each forked process, the loop of a helper process."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    # Forked processes share these objects' memory pages. A garbage collection in a forked process
    # would write to the objects, so that the kernel would have to copy the pages.
    gc.freeze()
    helper = serve_forks(control)
    if helper is None:
        return 0
    end_with_parent()
    os._exit(serve_jobs(helper.connection, set_up))


if __name__ == "__main__":
    sys.exit(main())
