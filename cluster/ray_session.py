"""Ray's life: started here or joined elsewhere, and nothing of it left behind."""

import logging
import os
import secrets
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import psutil
import ray
import ray._private.ray_constants as ray_constants
import ray._private.services as ray_services
import ray._private.state as ray_state
import ray._private.worker as ray_worker

from penstock.cluster.placement.placement import Node
from penstock.cluster.processes.process_tree import DescendantTracker, is_alive

OBJECT_STORE_BYTES = 80 * 2**20  # about the least that Ray takes: nothing of ours goes through it
LONGEST_TEMP = 40  # characters; names of sockets below it must stay under 107
VITAL_PROCESSES = ("gcs_server", "raylet")
SECONDS_TO_EXIT = 5.0

# Read by Ray when it starts, in this process and in those that it starts.
_LOCAL_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors without GPUs keep their environment
    "RAY_worker_niceness": "0",  # Ray would let everything else on the machine go first
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the node is 127.0.0.1: no port is open to others
}


class RayFailed(RuntimeError):
    """Ray did not start or cannot be reached; the message is one line."""


class RaySession:
    """A Ray of our own with its processes and files, or a connection to somebody's cluster.

    To be entered in the main thread: the kernel ends Ray's processes when the thread that made them
    ends. Entering raises `RayFailed`; leaving leaves nothing behind.

    Args:
        address: of a running cluster; None: start one here.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._folder: Path | None = None
        self._vital: list[psutil.Process] = []
        self._descendants = DescendantTracker()

    def __enter__(self) -> Self:
        # Its remarks on single workers (what died, with advice) come from the supervisor instead.
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
        """Whether the processes live without which a Ray of our own is none."""
        return all(map(is_alive, self._vital))

    def _start_local(self) -> None:
        parent = tempfile.gettempdir()
        if len(parent) > LONGEST_TEMP:
            parent = "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-", dir=parent))
        # A token of our own: Ray's default is to write one into the home folder.
        os.environ.update(_LOCAL_SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
        ray_constants.ENABLE_RAY_CLUSTER = False  # as above; this process has read it already
        # In sessions of their own: what signals our group, to end us in order, must not end them.
        ray_services.ConsolePopen = partial(subprocess.Popen, start_new_session=True)
        ray.init(
            address="local",
            _temp_dir=str(self._folder / "ray"),  # Ray opens its own folder to everybody
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self._vital = [each for each in self._descendants.alive() if each.name() in VITAL_PROCESSES]

    def stop(self) -> None:
        """End Ray, every process that it started and every file that it wrote here."""
        self._descendants.alive()  # where orphans are not ours, they must have been seen before
        with suppress(Exception):  # half started: what is left is killed below
            ray.shutdown()
        if self._folder is not None:
            self._descendants.wait(SECONDS_TO_EXIT)
        self.abandon()

    def abandon(self) -> None:
        """`stop` without asking anybody: for the last moment before the process exits."""
        self._descendants.kill(SECONDS_TO_EXIT)
        # Last: as long as one of them lives, it may write.
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def free_nodes() -> list[Node]:
    """What is free on the nodes of the cluster now."""
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
    """An error's message without what follows its first line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
