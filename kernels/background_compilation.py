"""Loads deferred groups of loops that child processes compile, while the worker already serves.

Only the first start on a machine needs this. Until a group is loaded, its operations use a slower
form (`deferred_loops`). A thread of the worker could not compile, because it would hold the GIL
most of the time. The child (`compile_groups`) marks each group that it has compiled.
"""

import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO

from penstock.kernels.cpu_common.compile_lock import compile_lock
from penstock.kernels.cpu_common.deferred_loops import defer, finish
from penstock.kernels.cpu_common.numba_runtime import lock_folder
from penstock.kernels.cpu_compilation import CpuKernelNeeds, KernelGroup, is_compiled

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Number of children that may fail, or compile nothing, before a worker gives up."""

_POLL_SECONDS = 0.2
_MAX_ERROR_CHARS = 300


class BackgroundLoader:
    """Defers groups of loops, and loads each group once a child process has compiled it.

    A worker starts a child only if some group is neither compiled nor being compiled by another
    process, so the workers of a machine divide the work. If `MAX_FAILURES` children fail, a warning
    is logged, and the groups that are not loaded stay deferred.

    Args:
        needs: needs of this worker.
        groups: the groups to defer, from `deferrable_groups`. The child compiles them in this
            order, except those that another process is compiling.
        command: command of the child; empty: the module `compile_groups`.
    """

    def __init__(
        self, needs: CpuKernelNeeds, groups: Sequence[KernelGroup], command: Sequence[str] = ()
    ) -> None:
        self._groups = {each.name: each for each in groups}
        self._command = command or (
            *(sys.executable, "-P", "-m", "penstock.kernels.compile_groups"),
            *(json.dumps(asdict(needs)), *self._groups),
        )
        self._folder = lock_folder()
        self._thread = threading.Thread(target=self._run, name="background loops", daemon=True)
        defer(self._groups)

    def start(self) -> None:
        """Start the background thread that loads the groups; without groups, do nothing."""
        if self._groups:
            self._thread.start()

    def join(self) -> None:
        """Wait until the background thread has ended; return at once if it was not started."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        log.info("steps are slower until all CPU kernels are compiled, first start only")
        try:
            self._load_all()
        except Exception as error:
            log.warning(
                "steps stay slower, because the CPU kernels %s could not be compiled: %s. The next "
                "start tries again",
                ", ".join(self._groups),
                error,
            )
        else:
            log.info("all CPU kernels are compiled, after %.0f s", time.monotonic() - began)

    def _load_all(self) -> None:
        """Load each group when it is compiled, and start children for the others.

        Raises:
            OSError: a child could not be started.
            RuntimeError: too many children failed; the message has the last line of the last one.
        """
        num_failures = 0
        while True:
            self._load_compiled()
            if not self._groups:
                return
            if any(not self._is_locked(name) for name in self._groups):
                num_before = len(self._groups)
                failure = self._run_child()
                num_failures += len(self._groups) == num_before
                if num_failures == MAX_FAILURES:
                    raise RuntimeError(failure)
            time.sleep(_POLL_SECONDS)

    def _load_compiled(self) -> None:
        for group in list(self._groups.values()):
            if is_compiled(self._folder, group.name):
                group.load()
                finish(group.name)
                del self._groups[group.name]

    def _is_locked(self, name: str) -> bool:
        """Return whether another process is compiling the group."""
        with compile_lock(self._folder, name, 0.0) as is_held:
            return not is_held

    def _run_child(self) -> str:
        """Load groups while a child compiles; return the last line of the child's errors."""
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                start_new_session=True,  # Ctrl-C ends only this process, which then ends the child
            ) as child,
        ):
            while child.poll() is None:
                self._load_compiled()
                time.sleep(_POLL_SECONDS)
            self._load_compiled()
            return _last_line(errors) or f"exit status {child.returncode}"


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:_MAX_ERROR_CHARS] if lines else ""
