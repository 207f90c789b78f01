"""Compiles the numba loops that a CPU worker needs. The processes of a machine share this work.

Compiled loops are cached on disk (`numba_runtime`), so a machine compiles them only once. When
several workers start at the same time, each worker compiles the groups of loops that no other
process has claimed. It loads the other groups from disk when they are ready. A process claims a
group with a file lock (flock). The operating system releases the lock when the process ends.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.kernels.activation import op as activation
from penstock.kernels.attention import cpu_plan
from penstock.kernels.cpu_common.compile_lock import MAX_LOCK_SECONDS, compile_lock
from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba, lock_folder
from penstock.kernels.kv_cache import checksum
from penstock.kernels.kv_cache import op as cache
from penstock.kernels.kv_cache.format import format_of
from penstock.kernels.linear import cpu_packed_f32, cpu_packed_int4, quantize_rows
from penstock.kernels.linear import cpu_packed_int8 as cpu_packed_int8
from penstock.kernels.linear import quantized as quantized_linear
from penstock.kernels.norm import op as norm
from penstock.kernels.sampling import philox, token_mask
from penstock.kernels.step_graph import graph
from penstock.kernels.step_graph.opcodes import Extensions


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """A group of loops that are compiled together.

    Attributes:
        name: name of the group, the same in all processes.
        load: function that loads the loops from disk into this process, or compiles them.
    """

    name: str
    load: Callable[[], object]


Products = Literal["int8", "int4", "weight-only"]
"""Kinds of products with quantized weights: weights of 8 or 4 bits with INT8 activations, or any
weights with float activations (`kernels/linear/quantized.py`)."""


def required_groups(
    device: torch.device,
    weights: torch.dtype,
    kv_cache: torch.dtype,
    products: Collection[Products],
    single_rank: bool,
    experts: bool = False,
) -> list[KernelGroup]:
    """Return the groups of loops that a worker needs, the slowest ones to compile first.

    Args:
        device: the worker's device; for a GPU, the list is empty.
        weights: dtype of the weights.
        kv_cache: dtype of the KV cache.
        products: the kinds of products with quantized weights.
        single_rank: whether the worker has only one rank.
        experts: whether the model is a mixture of experts.
    """
    if device.type != "cpu" or not has_numba():
        return []
    kept = format_of(kv_cache).name
    groups = []
    if weights == torch.float32:
        if single_rank and cpu_packed_f32.has_avx2():
            extensions = Extensions(
                "int8" in products, experts, "weight-only" in products, "int4" in products
            )
            load = partial(graph.load_cpu_kernels, kv_cache, extensions)
            groups.append(KernelGroup(f"program-{kept}{extensions}", load))
        if cpu_packed_f32.has_avx2():
            groups.append(KernelGroup("panels", cpu_packed_f32.load_cpu_kernels))
        groups += _quantized_groups(device, weights, products)
    if cpu_plan.supports_cpu_paged(device, kv_cache):
        groups.append(KernelGroup(f"attention-{kept}", lambda: cpu_plan.load_cpu_kernels(kv_cache)))
    groups.append(KernelGroup("noise", philox.load_cpu_kernels))
    groups.append(KernelGroup("checksum", checksum.load_cpu_kernels))
    groups.append(KernelGroup("token-masks", token_mask.load_cpu_kernels))
    if weights == torch.float32:
        groups += [
            KernelGroup(f"rotary-{kept}", lambda: cache.load_cpu_kernels(kv_cache)),
            KernelGroup("gates", activation.load_cpu_kernels),
            KernelGroup("norms", norm.load_cpu_kernels),
        ]
    return groups


def _quantized_groups(
    device: torch.device, weights: torch.dtype, products: Collection[Products]
) -> list[KernelGroup]:
    """Return the groups of products with quantized weights."""
    groups = []
    if "weight-only" in products and quantized_linear.supports_dequantizing(device, weights):
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
                    self._load(group)
        # Then wait for the groups that other processes had locked, and load them.
        for group in self._groups.values():
            if group.name not in self._loaded:
                with compile_lock(folder, group.name, MAX_LOCK_SECONDS, self._record_compile):
                    self._load(group)

    def _load(self, group: KernelGroup) -> None:
        group.load()
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
