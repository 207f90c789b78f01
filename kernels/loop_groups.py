"""Compiles what a worker's CPU needs of numba's loops, each by one process of the machine.

Loops are kept on disk (`compiled`), so a machine compiles them once. When several workers start for
the first time side by side, each takes the groups of loops that no other one has begun, and loads
the others from disk when they are done. A group is taken by a lock on a file (flock), which the
kernel releases when its holder ends.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.kernels import (
    activation,
    cache,
    in_place,
    noise,
    norm,
    panel_product,
    program,
    row_levels,
)
from penstock.kernels import level_product as levels
from penstock.kernels.compiled import cache_folder, has_loops, settle_numba

MOST_SECONDS_HELD = 180.0
"""Wait for another process's group; a holder that is stopped must not hold up others for ever."""

SECONDS_BETWEEN_TRIES = 0.05

SECONDS_TO_LOAD = 0.5
"""A lock that is held for longer is held by a process that compiles; loading takes less."""


@dataclass(frozen=True, slots=True)
class Group:
    """Loops that are compiled together.

    load: compiles them, or loads them from disk, into this process.
    needs: groups that `load` would compile as well, unless they are there.
    """

    name: str
    load: Callable[[], object]
    needs: tuple[str, ...] = ()


def needed_groups(
    device: torch.device, weights: torch.dtype, kv_cache: torch.dtype, quantized: bool, alone: bool
) -> list[Group]:
    """The groups that a worker computes with, in the order in which they are to be taken.

    alone: the worker has one rank.
    """
    if device.type != "cpu" or not has_loops():
        return []
    narrow = kv_cache == torch.bfloat16
    kept = "narrow" if narrow else "wide"
    groups = []
    if in_place.can_read_in_place(device, kv_cache):
        groups.append(Group(f"attention-{kept}", lambda: in_place.load_loops(kv_cache)))
    if weights == torch.float32:
        small = [
            Group(f"rotary-{kept}", lambda: cache.load_loops(narrow)),
            Group("noise", noise.load_loops),
            Group("gates", activation.load_loops),
            Group("norms", norm.load_loops),
            Group("levels", row_levels.load_loops),
        ]
        if panel_product.has_wide_vectors():
            small.insert(0, Group("panels", panel_product.load_loops))
        if quantized and panel_product.has_matrix_unit():
            small.append(Group("level-products", levels.load_loops))
        groups += small
        if alone and panel_product.has_wide_vectors():
            needs = tuple(each.name for each in small)
            groups.append(
                Group(f"program-{kept}", lambda: program.prepare_program(kv_cache), needs)
            )
    else:
        groups.append(Group("noise", noise.load_loops))
    return groups


class LoopLoader:
    """Loads groups of loops in a thread of its own.

    tell: called once, in that thread, if this process compiles, or waits for one that does.
    folder: of the locks; processes that share compiled loops share it.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        tell: Callable[[], None] = lambda: None,
        folder: Path | None = None,
    ) -> None:
        self._tell = tell
        self._groups = {each.name: each for each in groups}
        self._folder = folder
        self._loaded: set[str] = set()
        self._has_compiled = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="loops", daemon=True)
        self._thread.start()

    @property
    def has_compiled(self) -> bool:
        """True once this process or, while this one waits, another one compiles."""
        return self._has_compiled

    @property
    def compiles(self) -> bool:
        """True while that goes on."""
        return self._has_compiled and self._thread.is_alive()

    def join(self) -> None:
        """Wait until all are loaded; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._groups:
                settle_numba()
                with _on_compile(self._note):
                    self._load_all(self._folder or _lock_folder())
        except BaseException as error:
            self._error = error

    def _note(self) -> None:
        if not self._has_compiled:
            self._has_compiled = True
            self._tell()

    def _load_all(self, folder: Path) -> None:
        for group in self._groups.values():  # what no other process has taken
            with _lock(folder, group.name, 0.0) as is_held:
                if is_held:
                    self._load(folder, group)
        for group in self._groups.values():  # and then what others have compiled meanwhile
            self._wait_and_load(folder, group)

    def _wait_and_load(self, folder: Path, group: Group) -> None:
        if group.name in self._loaded:
            return
        with _lock(folder, group.name, MOST_SECONDS_HELD, self._note):
            self._load(folder, group)

    def _load(self, folder: Path, group: Group) -> None:
        for name in group.needs:
            if name in self._groups:
                self._wait_and_load(folder, self._groups[name])
        group.load()
        self._loaded.add(group.name)


def _lock_folder() -> Path:
    folder = cache_folder() / "locks"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def _lock(
    folder: Path, name: str, seconds: float, tell: Callable[[], None] = lambda: None
) -> Iterator[bool]:
    """Hold the lock of that name; False if it was not had within so many seconds.

    Where the file system has no locks everybody is let in: work is then done twice, and is right.
    tell: called once the lock was waited for so long that its holder must be compiling.
    """
    try:
        number = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _take(number, seconds, tell)
    finally:
        os.close(number)


def _take(number: int, seconds: float, tell: Callable[[], None]) -> bool:
    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            if waited >= SECONDS_TO_LOAD and not told:
                tell()
                told = True
            time.sleep(SECONDS_BETWEEN_TRIES)
        except OSError:
            return True
        else:
            return True


@contextmanager
def _on_compile(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` whenever numba compiles a function that it has not found on disk."""
    from numba.core import event

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            tell()

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Listener()):
        yield
