"""Captures of device work on a CPU, in the form of a CUDA graph.

A capture records every torch operation, kernel launch and collective of a function as a command. A
replay executes the commands again on the same tensors, without the function's Python code. As in a
CUDA graph, an operation that reads a value on the host fails.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from penstock.kernels.triton_common import launch as launch_module
from penstock.workers.parallel.collectives import ProcessGroup

_recording = threading.local()
# Triton's interpreter changes global names while it runs, so one thread may use it at a time.
_interpreter = threading.Lock()


class HostRead(AssertionError):
    """Raised if a captured function reads a tensor's value on the host."""


_READS = (
    *("item", "_local_scalar_dense", "nonzero", "bincount", "unique", "masked_select", "equal"),
    "resolve_neg",  # `tolist` and `numpy` call this operation
)
"""Operations that wait for a device. This set does not contain `cpu()`, because here the device is
a CPU."""

_WITHOUT_VALUES = ("empty", "new_empty", "empty_like", "new_empty_strided", "empty_strided")


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, commands: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._commands = commands

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS:
            raise HostRead(name)
        found = func(*args, **(kwargs or {}))
        if name not in _WITHOUT_VALUES:
            self._commands.append(lambda: _again(func, args, kwargs or {}, found))
        return found


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> None:
    again = func(*args, **kwargs)
    for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class Tape:
    """Captures functions, and counts captures, commands and replays."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.captured = 0
        self.replayed = 0
        self.num_commands = 0

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()  # a first run before the capture, as for a CUDA graph
        commands: list[Callable[[], None]] = []
        _recording.commands = commands
        try:
            with _Recorder(commands):
                compute()
        finally:
            _recording.commands = None
        self.captured += 1
        self.num_commands += len(commands)

        def replay() -> None:
            self.replayed += 1
            for command in commands:
                command()

        return replay


def _recorded(run: Callable[[], None]) -> None:
    """Run a command and record it as one command; its inner operations are not recorded."""
    commands = getattr(_recording, "commands", None)
    if commands is None:
        run()
        return
    with _disable_current_modes():
        run()
    commands.append(run)


def record_launches_and_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tapes record interpreted Triton launches, and collectives."""
    run_kernel, run_collective = launch_module.run_kernel, ProcessGroup._run

    def launch(*arguments: Any) -> None:
        def run() -> None:
            with _interpreter:
                run_kernel(*arguments)

        _recorded(run)

    def collective(group: ProcessGroup, start: Any) -> None:
        _recorded(lambda: run_collective(group, start))

    monkeypatch.setattr(launch_module, "run_kernel", launch)
    monkeypatch.setattr(ProcessGroup, "_run", collective)
