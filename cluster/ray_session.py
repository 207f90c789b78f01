"""Starts Ray locally or connects to a running cluster, and cleans up afterwards."""

import logging
import os
import secrets
import shutil
import subprocess
import tempfile
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

from penstock.cluster.placement.placement import Node
from penstock.cluster.processes.environment import child_environment
from penstock.cluster.processes.process_tree import DescendantTracker, is_alive
from penstock.workers.rank.core_sharing import marks_path, remove_unused_marks

OBJECT_STORE_BYTES = 80 * 2**20  # about Ray's minimum; Penstock stores no objects
LONGEST_TEMP = 40  # characters, so that socket paths in the folder stay under 107
VITAL_PROCESSES = ("gcs_server", "raylet")
UNUSED_PROCESSES = ("start_api_server", "start_log_monitor", "start_monitor")
"""Methods of Ray's `Node` that start processes which a local Ray does not need: the dashboard, the
forwarding of logs, and Ray's autoscaler. Ray waits for the dashboard (about a second), and each of
the three takes 0.5 to 0.8 s of CPU time at the start and 50 to 75 MB of memory."""
SECONDS_TO_EXIT = 5.0

# Environment variables that Ray reads at start, in this process and its child processes.
_LOCAL_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep CUDA_VISIBLE_DEVICES if num_gpus=0
    "RAY_worker_niceness": "0",  # Ray's default lowers the priority of its workers
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # bind to 127.0.0.1 only
}


class RayFailed(RuntimeError):
    """Ray did not start or cannot be reached; the message is one line."""


class RaySession:
    """A local Ray instance with its processes and files, or a connection to a running cluster.

    Enter this context manager in the main thread: the kernel kills Ray's processes when the thread
    that started them ends. Entering raises `RayFailed` if Ray is not available; leaving ends
    the local processes and deletes their files.

    Args:
        address: address of a running cluster, or None to start one here.
        pass_env: names of variables that a local Ray's processes also get.
        secret_env: names of variables that they never get.
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

    def __enter__(self) -> Self:
        # Suppress Ray's own messages about dead workers: the supervisor reports them.
        ray_worker._worker_logs_enabled = False
        try:
            self._start()
        except (OSError, RuntimeError, ValueError) as error:
            self.stop()
            at = "did not start" if self._address is None else f"at {self._address} does not answer"
            raise RayFailed(f"Ray {at}: {first_line(error)}") from error
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        if self._address is None:
            self._start_local()
        else:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)

    def is_alive(self) -> bool:
        """Return False if a local Ray has lost its GCS server or its raylet."""
        return all(map(is_alive, self._vital))

    def _start_local(self) -> None:
        parent = tempfile.gettempdir()
        if len(parent) > LONGEST_TEMP:
            parent = "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-", dir=parent))
        # Set a token; otherwise Ray generates one and writes a file in the home folder.
        os.environ.update(_LOCAL_SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
        ray_constants.ENABLE_RAY_CLUSTER = False  # Ray read the environment variable at import
        ray_services.ConsolePopen = self._start_process
        for name in UNUSED_PROCESSES:
            setattr(ray_node.Node, name, _start_nothing)
        ray.init(
            address="local",
            _temp_dir=str(self._folder / "ray"),  # world-writable, so inside a private folder
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self._vital = [each for each in self._descendants.alive() if each.name() in VITAL_PROCESSES]

    def _start_process(
        self, command: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> "subprocess.Popen[bytes]":
        """Start a process of Ray: without the shell's secrets, in a session of its own.

        A signal to our process group (Ctrl-C) must not kill Ray before the cluster has drained.
        """
        passed = child_environment(env, os.environ, self._pass_env, self._secret_env)
        return subprocess.Popen(command, env=passed, start_new_session=True, **options)

    def stop(self) -> None:
        """Shut Ray down, kill all local processes of Ray, and delete Ray's files."""
        self._descendants.alive()  # record processes now: only Linux finds orphans later
        with suppress(Exception):  # Ray may be only partly started; `abandon` kills the rest
            ray.shutdown()
        if self._folder is not None:
            self._descendants.wait(SECONDS_TO_EXIT)
        self.abandon()

    def abandon(self) -> None:
        """Kill Ray's processes at once and delete Ray's files, without shutting Ray down."""
        self._descendants.kill(SECONDS_TO_EXIT)
        # Delete files last, because a process that is still alive may write new ones.
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            remove_unused_marks(marks_path())


def _start_nothing(node: ray_node.Node, **_: object) -> None:
    """Do nothing; used in place of the methods in `UNUSED_PROCESSES`."""


def free_nodes() -> list[Node]:
    """Return the resources that are free on the cluster's live nodes."""
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
