"""`penstock serve`: check the arguments, start the cluster, and clean up when it stops."""

import asyncio
import errno
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from penstock.cli import checkpoint, flags
from penstock.cli.view import View, make_view
from penstock.cluster.spec.api_keys import check_access, key_variables, read_api_keys
from penstock.cluster.spec.chat_template import with_chat_template
from penstock.cluster.spec.records import SpecError
from penstock.cluster.spec.spec import ROLES, ClusterSpec
from penstock.cluster.status import status_events
from penstock.common.api_key import VARIABLE, ApiKey
from penstock.common.gguf.checkpoint import is_gguf
from penstock.common.gguf.documents import has_chat_template
from penstock.common.loopback import is_loopback
from penstock.workers.models.config import BadCheckpoint, UnsupportedModel, read_json
from penstock.workers.parallel.mesh import BadShape, Mesh
from penstock.workers.weights.sharding import check_folder

if TYPE_CHECKING:
    from penstock.cluster.ray_session import RaySession

QUESTION = "What is 17 plus 25?"
NO_KEY_NEEDED = "No API key is needed: whoever reaches these addresses may use the model."
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED_BY_SIGNAL = 130
SECONDS_TO_CONNECT = 5.0
RAY_CHECK_SECONDS = 0.5
ECHO_SECONDS = 0.5  # another signal within this many seconds of the first is ignored as a duplicate


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    The code is 2 if a check fails before any process is started, for example if an argument is
    wrong. The code is 1 after later failures.
    """
    try:
        spec = flags.read_spec(arguments)
        api_keys = read_api_keys(spec, os.environ)
        spec = with_chat_template(spec)
        check_access(spec, has_keys=bool(api_keys))
        folder = checkpoint.find(spec.checkpoint, spec.model.revision)
        # With `pool_nodes`, only the workers' nodes have the weights, so they are not checked here.
        checkpoint.check(folder, with_weights=not spec.pool_nodes)
        check_ranks(spec, folder)
        # On an existing cluster, routers may run elsewhere, so their ports are not checked.
        if spec.ray_address is None:
            check_ports(spec)
        else:
            check_ray(spec.ray_address)
    except (
        *(SpecError, checkpoint.NoModel, BadCheckpoint, UnsupportedModel),
        *(BadShape, BadAddress),
    ) as error:
        print(f"penstock serve: {error}", file=sys.stderr)
        return 2
    return serve(spec, folder, make_view(spec.log_format), api_keys)


class BadAddress(ValueError):
    """Listening on an address, or connecting to it, failed. The message names the address."""


def check_ranks(spec: ClusterSpec, folder: Path) -> None:
    """Check that the ranks of every pool can share the model. Raise `BadShape` if they cannot."""
    for role in ROLES:
        pool = getattr(spec.pools, role)
        if pool.most:
            try:
                check_folder(folder, Mesh(pool.tp, pool.pp, pool.ep))
            except BadShape as error:
                raise BadShape(f"pools.{role}: {error}") from None


def check_ports(spec: ClusterSpec) -> None:
    """Check that the ports of all routers are free. Raise `BadAddress` if one is not."""
    names = ("http", "grpc", "admin")
    ports = [zip(names, spec.ports(number), strict=True) for number in range(spec.routers)]
    for name, port in chain.from_iterable(ports):
        host = spec.router.admin_host if name == "admin" else spec.router.host
        flag = "admin-host" if name == "admin" else "host"
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            stop = "stop the process that uses it, or " if error.errno == errno.EADDRINUSE else ""
            raise BadAddress(
                f"cannot listen on {host} port {port} ({error.strerror}): {stop}give another "
                f"--{name}-port or --{flag}"
            ) from None


def check_ray(address: str) -> None:
    """Check that a server listens at the address of Ray.

    Without this check, Ray would repeat its attempts to connect for minutes.

    Raises:
        BadAddress: the address is invalid, or no server listens there.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in host:
        raise BadAddress(
            f"--ray-address {address}: expected HOST:PORT of the cluster's head (default port "
            "6379), or 'auto' on one of the cluster's machines"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), SECONDS_TO_CONNECT).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadAddress(
            f"--ray-address {address}: cannot connect ({reason}): start Ray at this address, or "
            "correct the address"
        ) from None


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP.

    The first signal starts a graceful shutdown, and the second signal kills all processes. Before
    the cluster runs, the first signal raises KeyboardInterrupt instead. Other code may catch this
    exception while Ray starts. The property `wanted` therefore also shows that a signal arrived.
    """

    def __init__(self) -> None:
        self.first: Callable[[], object] = _interrupt
        # Called at the second signal, to kill all processes.
        self.abandon: Callable[[], object] = _nothing
        self._first_seen: float | None = None

    @property
    def wanted(self) -> bool:
        """True if a signal was received."""
        return self._first_seen is not None

    def install(self) -> None:
        for number in SIGNALS:
            # Under `nohup`, a process ignores SIGHUP, so do not install a handler for SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_seen is None:
            self._first_seen = now
            self.first()
        elif now - self._first_seen > ECHO_SECONDS:
            for each in SIGNALS:  # a third signal must not interrupt the cleanup
                signal.signal(each, signal.SIG_IGN)
            self.abandon()
            os._exit(STOPPED_BY_SIGNAL)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _nothing() -> None:
    pass


def serve(spec: ClusterSpec, folder: Path, view: View, api_keys: Sequence[ApiKey]) -> int:
    """Serve until the cluster is stopped, and return the exit code."""
    interrupts = Interrupts()
    code, failure = 0, ""
    try:
        interrupts.install()
        failure = _serve(spec, folder, view, interrupts, api_keys)
    except (KeyboardInterrupt, SystemExit):
        code = STOPPED_BY_SIGNAL
    finally:
        interrupts.first = _nothing
        view.close()
    if failure:
        print(f"penstock serve: {failure}", file=sys.stderr)
        return 1
    view.print_line("stopped")
    return code


def _serve(
    spec: ClusterSpec,
    folder: Path,
    view: View,
    interrupts: Interrupts,
    api_keys: Sequence[ApiKey],
) -> str:
    """Serve until the cluster is stopped. Return the reason if it failed, and "" otherwise."""
    # Importing Ray takes a second, so errors about arguments are reported before this import.
    from penstock.cluster.placement.placement_plan import PlacementError
    from penstock.cluster.processes.actor_handle import StartFailed
    from penstock.cluster.ray_session import RayFailed, RaySession
    from penstock.cluster.supervisor import Supervisor

    session = RaySession(spec.ray_address, spec.pass_env, key_variables(spec))
    run = _Run(spec, folder, view, session, interrupts, bool(api_keys))
    try:
        run.start_ray()
        with run.session:
            run.supervise(lambda stop: Supervisor(spec, folder, run.show, api_keys).run(stop))
    except (RayFailed, PlacementError, StartFailed) as error:
        return str(error)
    return ""


class _Run:
    """One run of the command, from the start of Ray until Ray has been shut down."""

    def __init__(
        self,
        spec: ClusterSpec,
        folder: Path,
        view: View,
        session: "RaySession",
        interrupts: Interrupts,
        has_keys: bool,
    ) -> None:
        self.session = session
        self._has_keys = has_keys
        self._spec = spec
        self._folder = folder
        self._view = view
        self._began = time.monotonic()
        self._interrupts = interrupts
        interrupts.abandon = session.abandon

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def start_ray(self) -> None:
        """Report that Ray is being started, or that the program connects to Ray."""
        self._view(
            "Ray", status_events.Progress("connecting" if self._spec.ray_address else "starting")
        )

    def supervise(self, work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
        """Run `work` with an event. Setting the event makes `work` shut down gracefully."""
        # Ray has replaced the signal handlers by its own, so install those of this class again.
        self._interrupts.install()
        self._view("Ray", status_events.Ready(self._seconds))
        asyncio.run(self._supervise(work))

    async def _supervise(self, work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self._interrupts.first = lambda: loop.call_soon_threadsafe(stop.set)
        # If a signal arrived while Ray started, Ray may have caught the KeyboardInterrupt.
        if self._interrupts.wanted:
            raise KeyboardInterrupt
        watching = asyncio.create_task(self._watch_ray())
        try:
            await work(stop)
        finally:
            self._interrupts.first = lambda: None  # the shutdown is already running
            watching.cancel()

    async def _watch_ray(self) -> None:
        while self.session.is_alive():
            self.session.reap_orphans()
            await asyncio.sleep(RAY_CHECK_SECONDS)
        # Ray is dead, so every call of Ray, including `ray.shutdown`, would hang for a minute.
        self._view.close()
        print(
            "penstock serve: Ray died, so the cluster has ended",
            file=sys.stderr,
            flush=True,
        )
        self.session.abandon()
        os._exit(1)

    def show(self, title: str, notice: status_events.StatusEvent) -> None:
        """Show a status event. Once the cluster serves, also print how to use it."""
        self._view(title, notice)
        if isinstance(notice, status_events.Serving) and self._spec.log_format == "text":
            for line in greeting(self._spec, self._folder, notice, self._seconds, self._has_keys):
                self._view.print_line(line)


def greeting(
    spec: ClusterSpec,
    folder: Path,
    serving: status_events.Serving,
    seconds: float,
    has_keys: bool,
) -> list[str]:
    """Return the lines to print when the cluster is ready, with addresses and commands to paste."""
    name = spec.model_name
    http, grpc, admin = map(_reachable, (serving.http, serving.grpc, serving.admin))
    body: dict[str, object] = {"model": name, "temperature": 0}
    if spec.model.chat_template is not None or _chats(folder):
        path, body["messages"] = "chat/completions", [{"role": "user", "content": QUESTION}]
    else:
        path, body["prompt"] = "completions", QUESTION
    key = f'-H "Authorization: Bearer ${VARIABLE}" ' if has_keys else ""
    admins = [serving.admin, *(each for *_, each in serving.others)]
    for_anyone = not (has_keys or is_loopback(spec.router.host))
    return [
        "",
        f"{name} is served after {seconds:.1f} s: HTTP (OpenAI API) on http://{serving.http}, "
        f"gRPC on {serving.grpc}",
        *(f"and on http://{http} and {grpc}" for http, grpc, _ in serving.others),
        "for operators: " + ", ".join(f"http://{each}" for each in admins),
        *([NO_KEY_NEEDED] * for_anyone),
        "",
        f"  curl http://{http}/v1/{path} {key}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}",
        f"  {_program()} chat --address {grpc}",
        f"  {_program()} status http://{admin}",
        *([f"({VARIABLE} must contain your API key.)"] * has_keys),
        "",
        "Ctrl-C drains and stops.",
    ]


def _program() -> str:
    """Return a command that runs this program from the current folder."""
    here = Path(sys.executable).with_name("penstock")
    if shutil.which("penstock") is not None or not here.exists():
        return "penstock"
    return os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here)


def _reachable(address: str) -> str:
    """Return the address to which clients connect. A wildcard address becomes 127.0.0.1."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "::", "[::]") else address


def _chats(folder: Path) -> bool:
    if is_gguf(folder):
        return has_chat_template(folder)
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(read_json(path).get("chat_template"))
