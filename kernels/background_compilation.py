"""Compiles deferred groups of loops in a child process, while the worker already serves.

Only the first start on a machine needs this. Until a group is loaded, its operations use a slower
form (`deferred_loops`). A thread of the worker could not compile, because it would hold the GIL
most of the time.

Usage of the child process: python -m penstock.kernels.background_compilation NEEDS NAME ...

NEEDS are the fields of `CpuKernelNeeds` in JSON, and each NAME the name of a group. The process
prints the name of each group that is in the disk cache. It ends when its standard input closes,
because the worker that started it has then ended.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from penstock.kernels.cpu_common.deferred_loops import defer, finish
from penstock.kernels.cpu_compilation import (
    CpuKernelLoader,
    CpuKernelNeeds,
    KernelGroup,
    required_groups,
)

log = logging.getLogger(__name__)

_NICENESS = 5  # the worker's steps get most of a core that both processes use
_MAX_ERROR_CHARS = 300


class BackgroundLoader:
    """Defers groups of loops, and loads each group once a child process has compiled it.

    The children of several workers divide the groups, as `CpuKernelLoader` does. If a child fails,
    a warning is logged, and the groups that are not loaded stay deferred.

    Args:
        needs: needs of this worker.
        groups: the groups to defer, from `deferrable_groups`.
        command: command of the child process; empty: this module.
    """

    def __init__(
        self, needs: CpuKernelNeeds, groups: Sequence[KernelGroup], command: Sequence[str] = ()
    ) -> None:
        self._groups = {each.name: each for each in groups}
        self._command = command or (
            *(sys.executable, "-P", "-m", __name__),
            *(json.dumps(asdict(needs)), *self._groups),
        )
        self._thread = threading.Thread(target=self._run, name="background loops", daemon=True)
        defer(self._groups)

    def start(self) -> None:
        """Start to compile, in a background thread. Do nothing if no group is deferred."""
        if self._groups:
            self._thread.start()

    def join(self) -> None:
        """Wait until all groups are loaded, or until compiling has failed."""
        if self._groups:
            self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        log.info("steps are slower until all CPU kernels are compiled, first start only")
        try:
            self._load_compiled()
        except Exception as error:
            log.warning(
                "steps stay slower, because some CPU kernels could not be compiled: %s. The next "
                "start compiles them",
                error,
            )
        else:
            log.info("all CPU kernels are compiled, after %.0f s", time.monotonic() - began)

    def _load_compiled(self) -> None:
        """Start the child, and load each group whose name the child prints.

        Raises:
            OSError: the child could not be started.
            RuntimeError: the child failed; the message has the last line of its errors.
        """
        with subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C ends only this process, which then ends the child
        ) as child:
            assert child.stdout is not None
            last = ""
            for line in child.stdout:
                last = line.strip() or last
                group = self._groups.pop(last, None)
                if group is not None:
                    group.load()
                    finish(group.name)
            code = child.wait()
        if self._groups:
            raise RuntimeError(f"{last[:_MAX_ERROR_CHARS]} (exit status {code})")


def main() -> None:
    """Compile the groups that the arguments name, and print the name of each one."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.nice(_NICENESS)
    given = json.loads(sys.argv[1])
    needs, names = CpuKernelNeeds(**given | {"products": tuple(given["products"])}), sys.argv[2:]
    groups = [_printing(each) for each in required_groups(needs) if each.name in names]
    CpuKernelLoader(groups).join()


def _printing(group: KernelGroup) -> KernelGroup:
    """Return the group with a function `load` that also prints its name."""

    def load() -> None:
        group.load()
        print(group.name, flush=True)

    return replace(group, load=load)


def _exit_with_parent() -> None:
    # not `sys.stdin.read`, which would hold a lock that Python needs to exit
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
