"""Compiles groups of loops into the disk cache; `background_compilation` starts this process.

Usage: python -m penstock.kernels.compile_groups NEEDS NAME ...

NEEDS are the fields of `CpuKernelNeeds` in JSON, and each NAME the name of a group. Groups that
another process is compiling are left out. The process ends when its standard input closes, because
the worker that started it has then ended.
"""

import json
import os
import sys
import threading
import traceback

NICENESS = 5
"""The steps of the worker get most of a core on which this process also runs."""

PARENT_ENDED = 3
"""Exit status after the worker has ended."""


def main() -> int:
    """Compile the groups that the arguments name; return 1 if one of them failed."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.nice(NICENESS)

    # These imports take seconds, so the thread must run before them.
    from penstock.kernels.cpu_common.compile_lock import compile_lock
    from penstock.kernels.cpu_common.numba_runtime import configure_numba, lock_folder
    from penstock.kernels.cpu_compilation import CpuKernelNeeds, load_and_mark, required_groups

    configure_numba()
    needs, names = CpuKernelNeeds(**json.loads(sys.argv[1])), sys.argv[2:]
    groups, has_failed = {each.name: each for each in required_groups(needs)}, False
    for name in names:
        with compile_lock(lock_folder(), name, 0.0) as is_held:
            if is_held:
                try:
                    load_and_mark(lock_folder(), groups[name])
                except Exception:
                    traceback.print_exc()
                    has_failed = True
    return int(has_failed)


def _exit_with_parent() -> None:
    # `sys.stdin.read` would hold a lock that the interpreter needs when it exits.
    os.read(sys.stdin.fileno(), 1)
    os._exit(PARENT_ENDED)


if __name__ == "__main__":
    sys.exit(main())
