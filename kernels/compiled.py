"""What numba compiles for a CPU: kept on disk, so that a machine compiles it once."""

import ctypes
import os
import tempfile
import threading
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@cache
def has_loops() -> bool:
    """Whether numba is here: not on a machine that only has kernels run."""
    return find_spec("numba") is not None


def settle_numba() -> None:
    """To be called before a file of compiled loops is imported; once numba is known to be there."""
    import numba

    settings: Any = numba.config
    if not settings.CACHE_DIR:
        settings.CACHE_DIR = str(cache_folder())
    # OpenMP is what torch computes with: one pool of threads for both.
    settings.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


OPENMP = "libgomp.so.1.0.0"
"""By this name numba asks for the library that torch has under a shorter one."""

_thread = threading.local()


def use_threads(count: int) -> int:
    """Lets loops run in so many threads, at most as many as there are, which it returns: as many
    as torch has, for one pool serves both."""
    import numba

    count = min(count, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if numba.get_num_threads() != count:
        numba.set_num_threads(count)
    if not getattr(_thread, "is_settled", False):
        _keep_to_one_level()
        _thread.is_settled = True
    return count


ALONE = 1 << 15
"""Numbers that pass through memory from which on a second thread is worth waking."""


def run_loops(alone: Any, together: Any, *given: Any, num_threads: int) -> None:
    """Runs the form for one thread, or the one that takes their number last."""
    if num_threads == 1:
        alone(*given)
    else:
        together(*given, use_threads(num_threads))


def _keep_to_one_level() -> None:
    """Takes back what numba asked of OpenMP for this thread: that threads of a team have teams.

    torch's attention makes small products in each of its threads, which would all wake a team of
    their own: a prompt's took seven times as long.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(OPENMP).omp_set_max_active_levels(1)


def cache_folder() -> Path:
    """Where compiled loops are kept; one that lasts as this process where there is no home.

    Another one for other sources: numba sees a change in the file of a compiled function, but not
    in a file of what that calls.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = root / "penstock" / "kernels" / _digest()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp(prefix="penstock-kernels-"))
    return folder


def _digest() -> str:
    """Of all sources here that numba may compile."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return sha256(b"".join(each for each in sources if b"numba" in each)).hexdigest()[:16]
