"""Starts Ray locally or connects to a running Ray cluster, and cleans up afterwards."""

import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import ray
import ray._private.node as ray_node
import ray._private.ray_constants as ray_constants
import ray._private.services as ray_services
import ray._private.state as ray_state
import ray._private.worker as ray_worker

from penstock.cluster.placement.placement_plan import Node
from penstock.cluster.processes.environment import child_environment
from penstock.cluster.processes.process_tree import DescendantTracker, is_alive
from penstock.workers.rank.core_sharing import marks_path, remove_unused_marks

# Size of Ray's object store. Penstock stores no objects, so this is about Ray's minimum size.
OBJECT_STORE_BYTES = 80 * 2**20
# Longest folder name with which the paths of Ray's sockets stay below 107 characters.
LONGEST_TEMP = 40
VITAL_PROCESSES = ("gcs_server", "raylet")
UNUSED_PROCESSES = ("start_api_server", "start_log_monitor", "start_monitor")
"""Methods of Ray's `Node` that start processes which a local Ray does not need.

These processes are the dashboard, the forwarding of logs, and Ray's autoscaler. Each of them takes
0.5 to 0.8 s of CPU time at the start, and 50 to 75 MB of memory. Ray also waits for the dashboard,
for about a second.
"""
SECONDS_TO_EXIT = 5.0
SECONDS_TO_START = 180.0
"""Longest time that a raylet may take to register its node."""
SECONDS_BETWEEN_CALLS = 0.1
MAX_LOG_RECORD = 300  # maximum number of characters of a log record in an error message
MAX_STARTS = 3
"""Maximum number of attempts to start a local Ray. A raylet has once ended during its start, for a
reason that is not known."""

log = logging.getLogger(__name__)

_get_node = ray_services.get_node

# Environment variables that Ray reads at the start, in this process and its child processes.
_LOCAL_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Keep CUDA_VISIBLE_DEVICES in actors that request no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Longest time (s) that one call of `get_node` waits for a node. Between these calls, Penstock
    # checks whether Ray's processes are still running.
    "RAY_raylet_start_wait_time_s": "2",
    "RAY_worker_niceness": "0",  # without this, Ray lowers the priority of its actors
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen only on 127.0.0.1
}


class ProcessEnded(OSError):
    """The GCS server or the raylet has ended during the start."""


class RayFailed(RuntimeError):
    """Ray did not start or cannot be reached. The message has only one line."""


class RaySession:
    """A local Ray instance with its processes and files, or a connection to a running Ray cluster.

    Enter this context manager in the main thread, because the kernel kills Ray's processes when the
    thread that started them ends. Entering raises `RayFailed` if Ray is not available. Leaving ends
    the local processes and deletes their files.

    Args:
        address: address of a running Ray cluster, or None to start Ray on this machine.
        pass_env: names of further environment variables that the processes of a local Ray get.
        secret_env: names of environment variables that these processes never get.
    """

    def __init__(
        self,
        address: str | None,
        pass_env: Collection[str] = (),
        secret_env: Collection[str] = (),
    ) -> None:
        self._address = address
        self._pass_env = pass_env
        self._secret_env = secret_env
        self._folder: Path | None = None
        self._vital: list[psutil.Process] = []
        self._descendants = DescendantTracker()
        self._started: list[subprocess.Popen[bytes]] = []  # Ray's processes

    def __enter__(self) -> Self:
        # The supervisor reports dead workers, so suppress Ray's own messages about them.
        ray_worker._worker_logs_enabled = False
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._start()
        except BaseException as error:
            self._clean_up(on_sigterm)
            if not isinstance(error, Exception):
                raise
            # Ray raises a plain `Exception` if a node starts too slowly.
            what = "Ray did not start"
            if self._address is not None:
                what = f"cannot connect to Ray at {self._address}"
            raise RayFailed(f"{what}: {first_line(error)}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._clean_up()

    def _clean_up(self, on_sigterm: Any = None) -> None:
        """Call `stop`. If a signal handler raises an exception meanwhile, call it again.

        Args:
            on_sigterm: if not None, the handler of SIGTERM to restore. Ray's own handler raises
                SystemExit at every signal, so a second signal would interrupt the second call.
        """
        try:
            if on_sigterm is not None:
                signal.signal(signal.SIGTERM, on_sigterm)
            self.stop()
        except BaseException:
            try:
                # `abandon` alone is not enough: Ray would shut down when Python exits, and create
                # its folder again.
                self.stop()
            finally:
                self.abandon()
            raise

    def _start(self) -> None:
        if self._address is None:
            self._start_local()
        else:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)

    def is_alive(self) -> bool:
        """Return whether the GCS server and the raylet of a local Ray are running.

        For a connection to a running Ray cluster, the result is always True.
        """
        return all(map(is_alive, self._vital))

    def reap_orphans(self) -> None:
        """Reap ended orphans, such as the helper processes of a router that was killed."""
        waiting = {each.pid for each in self._started if each.returncode is None}
        self._descendants.reap_orphans(waiting)

    def _start_local(self) -> None:
        # Without a token, Ray would generate one and write it to a file in the home folder.
        os.environ.update(_LOCAL_SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
        # Ray read RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER at import, so set its constant as well.
        ray_constants.ENABLE_RAY_CLUSTER = False
        ray_services.ConsolePopen = self._start_process
        for name in UNUSED_PROCESSES:
            setattr(ray_node.Node, name, _start_nothing)
        ray_services.get_node = self._wait_for_node
        try:
            self._start_repeatedly()
        finally:
            ray_services.get_node = _get_node
        self._vital = [
            each for each in self._descendants.alive() if _process_name(each) in VITAL_PROCESSES
        ]

    def _start_repeatedly(self) -> None:
        """Start Ray, up to MAX_STARTS times as long as a process of Ray ends during the start."""
        parent = tempfile.gettempdir()
        if len(parent) > LONGEST_TEMP:
            parent = "/tmp"
        for starts_left in reversed(range(MAX_STARTS)):
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-", dir=parent))
            try:
                return self._init_local(self._folder)
            except ProcessEnded as error:
                if not starts_left:
                    raise
                log.warning("Ray: %s; starting Ray again", error)
                self.stop()
                self._descendants = DescendantTracker()

    def _init_local(self, folder: Path) -> None:
        ray.init(
            address="local",
            # Ray makes this folder world-writable, so it must be inside a private folder.
            _temp_dir=str(folder / "ray"),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    def _start_process(
        self, command: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> "subprocess.Popen[bytes]":
        """Start a process of a local Ray, without the secrets in the environment of the shell.

        The process gets its own session. Otherwise Ctrl-C would kill Ray before the cluster has
        drained.
        """
        passed = child_environment(env, os.environ, self._pass_env, self._secret_env)
        process = subprocess.Popen(command, env=passed, start_new_session=True, **options)
        self._started.append(process)
        return process

    def _wait_for_node(self, gcs_address: str, node_id: str) -> Any:
        """Wait until the raylet has registered its node, and return the node's description.

        This method replaces `get_node` of Ray. Ray would call `get_node` for only 30 s, which is
        too short on a busy machine.

        Raises:
            ProcessEnded: the raylet or the GCS server has ended.
            RuntimeError: the node is not registered after `SECONDS_TO_START`.
        """
        deadline = time.monotonic() + SECONDS_TO_START
        while True:
            try:
                return _get_node(gcs_address, node_id)
            except RuntimeError as error:
                alive = {_process_name(each) for each in self._descendants.alive()}
                for name in VITAL_PROCESSES:
                    if name not in alive:
                        reason = f": {last}" if (last := self._last_log_record(name)) else ""
                        raise ProcessEnded(f"{name} ended during its start{reason}") from error
                if time.monotonic() >= deadline:
                    raise
            time.sleep(SECONDS_BETWEEN_CALLS)

    def _last_log_record(self, name: str) -> str:
        """Return the last record in the log files of a Ray process, or "" if there is none."""
        assert self._folder is not None
        logs = sorted(self._folder.glob(f"ray/session_2*/logs/{name}.*"), key=_modified)
        lines = [line for each in logs for line in each.read_text(errors="replace").splitlines()]
        records = [line for line in lines if line.startswith("[")]  # not lines of a stack trace
        return records[-1][:MAX_LOG_RECORD] if records else ""

    def stop(self) -> None:
        """Shut Ray down, kill all local processes of Ray, and delete Ray's files."""
        # Record the processes now, because orphans can be found later only on Linux.
        self._descendants.alive()
        on_sigterm = signal.getsignal(signal.SIGTERM)
        # `ray.shutdown` may fail if Ray is only partly started. The remaining processes are killed
        # by `abandon`.
        with suppress(Exception):
            ray.shutdown()
        # Ray's C++ library has reset SIGTERM to its default action, without informing Python.
        if on_sigterm is not None:
            signal.signal(signal.SIGTERM, on_sigterm)
        if self._folder is not None:
            self._descendants.wait(SECONDS_TO_EXIT)
        self.abandon()

    def abandon(self) -> None:
        """Kill Ray's processes immediately and delete Ray's files, without shutting Ray down."""
        self._descendants.kill(SECONDS_TO_EXIT)
        # Delete the files last, because a process that is still alive may write new ones.
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            remove_unused_marks(marks_path())


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _process_name(process: psutil.Process) -> str:
    """Return the name of a process, or "" if the process has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def _start_nothing(node: ray_node.Node, **_: object) -> None:
    """Do nothing. Replaces the methods in `UNUSED_PROCESSES`."""


def free_nodes() -> list[Node]:
    """Return the free resources of each live node of the Ray cluster."""
    free = ray_state.available_resources_per_node()
    return [
        Node(
            node["NodeManagerAddress"],
            resources.get("CPU", 0.0),
            int(resources.get("GPU", 0)),
            dict(node["Labels"]),
        )
        for node in ray.nodes()
        if node["Alive"] and (resources := free.get(node["NodeID"])) is not None
    ]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
