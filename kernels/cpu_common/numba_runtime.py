"""Configures numba: its disk cache of compiled loops, and its threads."""

import atexit
import ctypes
import itertools
import logging
import os
import platform
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.kernels.cpu_common.compile_lock import compile_lock

log = logging.getLogger(__name__)

KERNELS = Path(__file__).parent.parent
"""Folder with the sources of all kernels. Any change of a file in this folder may change compiled
loops."""

_CODE_OPTIONS = (
    "OPT",
    "LOOP_VECTORIZE",
    "SLP_VECTORIZE",
    "BOUNDSCHECK",
    "LLVM_REFPRUNE_PASS",
    "DISABLE_INTEL_SVML",
    "CPU_NAME",
    "CPU_FEATURES",
)
"""Options of numba that change the compiled code. Each can be set by an environment variable."""


@cache
def has_numba() -> bool:
    """Return whether numba is installed. A machine that only runs Triton kernels may lack it."""
    return find_spec("numba") is not None


@cache
def configure_numba() -> None:
    """Configure numba. Call this function before the first import of a module of compiled loops."""
    import numba
    from numba.core import bytecode, codegen

    from penstock.kernels.cpu_common import late_codegen
    from penstock.kernels.cpu_common.cpu_features import has_avx512

    settings: Any = numba.config
    host: Any = codegen
    settings.CACHE_DIR = str(cache_folder())
    # torch uses OpenMP, too. If numba also uses OpenMP, torch and numba share one thread pool.
    settings.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    if has_avx512() and settings.CPU_FEATURES is None:
        # On many CPUs with AVX-512, LLVM uses only vectors of 256 bits by default.
        settings.CPU_FEATURES = f"{host.get_host_cpu_features()},-prefer-256-bit"
    # numba names compiled code after the function and a number. By default, each process counts
    # from 1, so two closures may get the same name in two processes. If a third process loads both
    # from the disk cache, LLVM uses one of them for both (numba issue 10486).
    identity: Any = bytecode.FunctionIdentity
    identity._unique_ids = itertools.count(secrets.randbits(62))
    late_codegen.install()


OPENMP = "libgomp.so.1.0.0"
"""File name of the OpenMP library (libgomp) that numba loads. torch has its own copy, with a
shorter name."""

_thread = threading.local()


def use_threads(count: int) -> int:
    """Set the number of threads of numba's parallel loops, limited to the size of numba's pool.

    Callers must pass torch's number of threads, because numba and torch share one OpenMP pool.

    Returns:
        The number of threads that was set.
    """
    import numba

    count = min(count, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if numba.get_num_threads() != count:
        numba.set_num_threads(count)
    if not getattr(_thread, "is_settled", False):
        disable_nested_openmp()
        _thread.is_settled = True
    return count


MIN_PARALLEL_ELEMENTS = 1 << 15
"""Smallest number of elements for which a second thread pays off (memory-bound operations)."""


def compile_function(function: Callable[..., Any], signature: str, **options: Any) -> Any:
    """Return a compiled function, loaded from the disk cache or compiled.

    If several processes need the same function, one of them compiles it. The others wait and then
    load it from the cache.

    Args:
        function: the function to compile.
        signature: types of the arguments and the result, in numba's notation.
        options: further options of `numba.njit`.
    """
    import numba

    njit: Any = numba.njit  # the stubs of numba's `njit` lack some of its options
    # All signatures of a function share one lock, because numba keeps them in one index file.
    with compile_lock(lock_folder(), f"{function.__module__}.{function.__qualname__}"):
        return njit(signature, nogil=True, cache=True, **options)(function)


class Entry:
    """A numba function that Python can call, compiled or loaded from disk when first needed.

    To import a module with entries therefore does not compile the entries. The CPU step graph
    imports such modules only for their inner functions, so one worker can compile the step graph
    while another worker compiles the entries.

    Args:
        function: the function to compile.
        signature: types of the arguments and the result, in numba's notation.
        options: further options of `numba.njit`.
    """

    def __init__(self, function: Callable[..., None], signature: str, **options: Any) -> None:
        self._function = function
        self._signature = signature
        self._options = options
        self._compiled: Any = None

    def load(self) -> Any:
        """Return the compiled function. The first call compiles it or loads it from disk."""
        if self._compiled is None:
            self._compiled = compile_function(self._function, self._signature, **self._options)
        return self._compiled

    def __call__(self, *arguments: Any) -> None:
        (self._compiled or self.load())(*arguments)


def entry(signature: str, **options: Any) -> Callable[[Callable[..., None]], Entry]:
    """Return a decorator that turns a function into an `Entry`."""
    return lambda function: Entry(function, signature, **options)


def load_entries(*entries: Entry) -> None:
    """Compile the functions `entries`, or load them from disk."""
    for each in entries:
        each.load()


def run_serial_or_parallel(serial: Any, parallel: Any, *given: Any, num_threads: int) -> None:
    """Call `serial` for one thread, or `parallel` for more.

    `parallel` gets the number of threads as an additional last argument.
    """
    if num_threads == 1:
        serial(*given)
    else:
        parallel(*given, use_threads(num_threads))


def disable_nested_openmp() -> None:
    """Disable nested OpenMP parallelism for this thread, because numba enables nesting.

    Each thread of torch's attention computes small matrix products. With nesting, each product
    starts its own team of threads, and attention over a prompt was seven times slower.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(OPENMP).omp_set_max_active_levels(1)


def cache_folder() -> Path:
    """Return the folder in which numba caches the compiled loops of these sources.

    The folder is `$NUMBA_CACHE_DIR/penstock/DIGEST` if this variable is set, otherwise a folder
    below `$XDG_CACHE_HOME` or `~/.cache`. Code in the folder is executed. If another user owns the
    folder or can write to it, a temporary folder of this process is used instead.
    """
    return _choose_cache_folder()[0]


def has_persistent_cache() -> bool:
    """Return whether other processes of this user find the compiled loops of this process."""
    return _choose_cache_folder()[1]


@cache
def _choose_cache_folder() -> tuple[Path, bool]:
    """Return the folder of the cache, and whether other processes use the same folder."""
    try:
        return _make_private(_cache_root(), source_digest(KERNELS)), True
    except (OSError, RuntimeError) as error:
        folder = Path(tempfile.mkdtemp(prefix="penstock-kernels-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        log.warning(
            "compiled CPU kernels are not cached, so every start compiles them: %s. Correct this, "
            "or set NUMBA_CACHE_DIR to a folder of your own",
            error,
        )
        return folder, False


@cache
def lock_folder() -> Path:
    """Return the folder of the lock files, and create it if possible.

    If the folder does not exist, processes compile without locks.
    """
    folder = cache_folder() / "locks"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def source_digest(sources: Path) -> str:
    """Return a hash of everything that determines the compiled code, except the CPU model.

    numba's own cache index contains the CPU's name and features. numba detects a change in the file
    of a cached function, but not in the files that this file imports. The hash therefore includes
    every Python file below `sources`, with its path.
    """
    import llvmlite
    import numba

    from penstock.kernels.cpu_common.cpu_features import has_amx, has_avx512

    settings: Any = numba.config
    made_by = [platform.python_version(), numba.__version__, llvmlite.__version__]
    options = [getattr(settings, name, None) for name in _CODE_OPTIONS]
    digest = sha256(repr((made_by, options, has_amx(), has_avx512())).encode())
    for path in sorted(sources.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(sources).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _cache_root() -> Path:
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        return Path(given) / "penstock"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return root / "penstock" / "kernels"


def _make_private(root: Path, name: str) -> Path:
    """Create `root/name` and Penstock's own parent folders; check that all of them are private.

    Raises:
        OSError: a folder cannot be created, or another user owns it or can write to it.
    """
    own = [root.parent, root] if root.name == "kernels" else [root]
    own[0].parent.mkdir(parents=True, exist_ok=True)
    for folder in [*own, root / name]:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _check_private(folder)
    return root / name


def _check_private(folder: Path) -> None:
    """Raise OSError if another user owns the folder or a link to it, or can write to the folder."""
    user = os.geteuid()
    for found in (folder.lstat(), folder.stat()):
        if found.st_uid != user:
            raise PermissionError(f"{folder} belongs to user {found.st_uid}: expected user {user}")
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} can be written by other users (mode {stat.S_IMODE(found.st_mode):o}): run "
            f"`chmod go-w {folder}`"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"this process may not create files in {folder}")
