"""Compiles the numba loops that a CPU worker needs. The processes of a machine share this work.

Compiled loops are cached on disk (`numba_runtime`), so a machine compiles them only once. When
several workers start at the same time, each worker compiles the groups of loops that no other
process has claimed. It loads the other groups from disk when they are ready. A process claims a
group with a file lock (flock). The operating system releases the lock when the process ends.

A worker can do without some groups at first (`deferrable_groups`). `background_compilation`
compiles them while the worker already serves.
"""

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.kernels.activation import op as activation
from penstock.kernels.attention import cpu_plan
from penstock.kernels.cpu_common.compile_lock import MAX_LOCK_SECONDS, compile_lock
from penstock.kernels.cpu_common.numba_runtime import (
    KERNELS,
    configure_numba,
    has_numba,
    has_persistent_cache,
    lock_folder,
)
from penstock.kernels.kv_cache import checksum
from penstock.kernels.kv_cache import op as cache
from penstock.kernels.kv_cache.format import FORMATS
from penstock.kernels.linear import cpu_packed_f32, cpu_packed_int4, quantize_rows
from penstock.kernels.linear import cpu_packed_int8 as cpu_packed_int8
from penstock.kernels.linear import quantized as quantized_linear
from penstock.kernels.norm import op as norm
from penstock.kernels.sampling import philox, row_scan, token_mask
from penstock.kernels.step_graph import graph
from penstock.kernels.step_graph.opcodes import Extensions


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """A group of loops that are compiled together.

    Attributes:
        name: name of the group, the same in all processes.
        load: function that loads the loops from disk into this process, or compiles them.
        is_deferrable: whether the operations have another form, for the time in which the group is
            deferred (`deferred_loops`). The form may round differently.
    """

    name: str
    load: Callable[[], object]
    is_deferrable: bool = False


Products = Literal["int8", "int4", "weight-only"]
"""Kinds of products with quantized weights: weights of 8 or 4 bits with INT8 activations, or any
weights with float activations (`kernels/linear/quantized.py`)."""


@dataclass(frozen=True, slots=True)
class CpuKernelNeeds:
    """Properties of a worker on a CPU that determine which loops it needs.

    Attributes:
        weights: dtype of the weights, such as "float32".
        kv_cache: name of the format of the KV cache (`kv_cache/format`).
        products: the kinds of products with quantized weights.
        deterministic: whether results must be batch-invariant.
        single_rank: whether the worker has only one rank.
        experts: whether the model is a mixture of experts.
    """

    weights: str
    kv_cache: str
    products: tuple[Products, ...] = ()
    deterministic: bool = False
    single_rank: bool = True
    experts: bool = False


def required_groups(needs: CpuKernelNeeds) -> list[KernelGroup]:
    """Return the groups of loops that a worker needs, the slowest ones to compile first.

    The list is empty if numba is not installed.
    """
    if not has_numba():
        return []
    kept, is_float32 = FORMATS[needs.kv_cache].dtype, needs.weights == "float32"
    groups = []
    if is_float32 and cpu_packed_f32.has_avx2():
        if needs.single_rank:
            products = needs.products
            extensions = Extensions(
                "int8" in products, needs.experts, "weight-only" in products, "int4" in products
            )
            load = partial(graph.load_cpu_kernels, kept, extensions)
            groups.append(KernelGroup(graph.loops_name(kept, extensions), load, True))
        groups.append(KernelGroup(cpu_packed_f32.LOOPS, cpu_packed_f32.load_cpu_kernels, True))
    if is_float32:
        groups += _quantized_groups(needs.products)
    if FORMATS[needs.kv_cache].array_dtype:
        load = partial(cpu_plan.load_cpu_kernels, kept)
        groups.append(KernelGroup(cpu_plan.loops_name(kept), load, True))
    groups.append(KernelGroup("noise", philox.load_cpu_kernels))
    groups.append(KernelGroup("checksum", checksum.load_cpu_kernels))
    groups.append(KernelGroup("token-masks", token_mask.load_cpu_kernels))
    groups.append(KernelGroup(row_scan.LOOPS, row_scan.load_cpu_kernels, True))
    if is_float32:
        load = partial(cache.load_cpu_kernels, kept)
        groups.append(KernelGroup(cache.loops_name(kept), load, True))
        groups.append(KernelGroup(norm.LOOPS, norm.load_cpu_kernels, True))
        groups.append(KernelGroup(activation.LOOPS, activation.load_cpu_kernels, True))
    return groups


def deferrable_groups(
    groups: Sequence[KernelGroup], needs: CpuKernelNeeds
) -> tuple[KernelGroup, ...]:
    """Return the groups that a worker can do without at first, and that are not compiled yet.

    The quickest ones to compile come first. A deterministic worker defers nothing, because it
    checks its kernels before it serves, and all ranks of a worker must round in the same way.
    Without a disk cache that other processes use, nothing is deferred either.
    """
    if needs.deterministic or not (needs.single_rank and has_persistent_cache()):
        return ()
    folder = lock_folder()
    deferrable = [each for each in reversed(groups) if each.is_deferrable]
    return tuple(each for each in deferrable if not is_compiled(folder, each.name))


def is_compiled(folder: Path, name: str) -> bool:
    """Return whether the loops of a group are in the disk cache.

    Args:
        folder: folder of the lock files, which also has the marks of compiled groups.
        name: name of the group.
    """
    return _mark(folder, name).exists()


def load_and_mark(folder: Path, group: KernelGroup) -> None:
    """Load the loops of a group, or compile them, and let `is_compiled` return True.

    Args:
        folder: folder of the lock files.
        group: the group.
    """
    group.load()
    with suppress(OSError):
        _mark(folder, group.name).touch()


def _mark(folder: Path, name: str) -> Path:
    """Return the path of a file that exists if the loops of the group are in the disk cache."""
    return folder / f"{name}-{_installation()}.compiled"


@functools.cache
def _installation() -> str:
    """Return a hash of the CPU and of the path of the sources.

    In its cache, numba finds compiled code by both. The digest of the sources is part of the path
    of the cache.
    """
    import llvmlite.binding

    cpu, features = llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features()
    return sha256(f"{KERNELS}\n{cpu}\n{features.flatten()}".encode()).hexdigest()[:16]


def _quantized_groups(products: Collection[Products]) -> list[KernelGroup]:
    """Return the groups of loops for products of float32 activations and quantized weights."""
    groups, cpu = [], torch.device("cpu")
    if "weight-only" in products and quantized_linear.supports_dequantizing(cpu, torch.float32):
        groups.append(KernelGroup("dequantizing", quantized_linear.load_cpu_kernels))
    if "int4" in products:
        groups.append(KernelGroup("int4-products", cpu_packed_int4.load_cpu_kernels))
    if "int8" in products:
        if cpu_packed_int8.has_int8_loops():
            groups.append(KernelGroup("level-products", cpu_packed_int8.load_cpu_kernels))
        groups.append(KernelGroup("levels", quantize_rows.load_cpu_kernels))
    return groups


class CpuKernelLoader:
    """Loads groups of loops in a background thread; the constructor starts the thread.

    Args:
        groups: the groups to load.
        notify: called once, in the background thread, when this process starts to compile, or when
            it starts to wait for another process that compiles.
        folder: folder of the lock files. Processes that share a disk cache must use the same
            folder. Default: a folder in the disk cache.
    """

    def __init__(
        self,
        groups: Sequence[KernelGroup],
        notify: Callable[[], None] = lambda: None,
        folder: Path | None = None,
    ) -> None:
        self._notify = notify
        self._groups = {each.name: each for each in groups}
        self._folder = folder
        self._loaded: set[str] = set()
        self._has_compiled = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="loops", daemon=True)
        self._thread.start()

    @property
    def has_compiled(self) -> bool:
        """True once this process has begun to compile or to wait for a process that compiles.

        The value stays True after compiling has ended.
        """
        return self._has_compiled

    @property
    def compiles(self) -> bool:
        """True while this process compiles, or waits for another process that compiles."""
        return self._has_compiled and self._thread.is_alive()

    def join(self) -> None:
        """Wait until all groups are loaded. If loading failed, raise the error."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._groups:
                configure_numba()
                with _on_compile(self._record_compile):
                    self._load_all(self._folder or lock_folder())
        except BaseException as error:
            self._error = error

    def _record_compile(self) -> None:
        if not self._has_compiled:
            self._has_compiled = True
            self._notify()

    def _load_all(self, folder: Path) -> None:
        # First, load the groups that no other process has locked.
        for group in self._groups.values():
            with compile_lock(folder, group.name, 0.0) as is_held:
                if is_held:
                    self._load(folder, group)
        # Then wait for the groups that other processes had locked, and load them.
        for group in self._groups.values():
            if group.name not in self._loaded:
                with compile_lock(folder, group.name, MAX_LOCK_SECONDS, self._record_compile):
                    self._load(folder, group)

    def _load(self, folder: Path, group: KernelGroup) -> None:
        load_and_mark(folder, group)
        self._loaded.add(group.name)


@contextmanager
def _on_compile(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify` within this context whenever numba compiles a function that is not cached."""
    from numba.core import event

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            notify()

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Listener()):
        yield
