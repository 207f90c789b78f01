"""Chooses the number of KV blocks of a worker."""

from collections.abc import Callable

import torch

from penstock.kernels.kv_cache.format import KvCacheFormat
from penstock.workers.config import StepSizes, WorkerConfig
from penstock.workers.kv_transfer.buffers import reserved_bytes
from penstock.workers.layers.available_memory import available_bytes
from penstock.workers.models.protocols import ModelInfo

# Largest fraction of the available memory for one worker; other programs need memory too.
_CPU_FRACTION = 0.25
# Fraction of the available memory for all workers that share the cores of one machine.
_SHARED_CPU_FRACTION = 0.5
# Fraction of the GPU memory that is free after loading, if steps are not profiled.
_GPU_FRACTION = 0.85
# Fraction of the GPU memory that steps and KV transfers leave free, if steps are profiled.
_GPU_FRACTION_OF_REST = 0.97


def choose_num_blocks(
    config: WorkerConfig,
    sizes: StepSizes,
    spec: ModelInfo,
    max_model_len: int,
    device: torch.device,
    form: KvCacheFormat,
    profile: Callable[[], int] | None = None,
) -> int:
    """Return the number of KV blocks that `config` sets or that fit into memory.

    The worker's ranks evenly share `kv_cache_mib`. Without it, ranks on a CPU evenly share the
    worker's part of the available memory; the result is then at most what `max_sequences`
    full-length sequences can fill. If workers share the cores of a machine, and no number of
    threads or CPUs is set, they get parts of its memory in proportion to their cores.

    Args:
        sizes: Sizes of steps and blocks.
        spec: Spec of this rank's shard.
        form: Format of the cache.
        profile: On a GPU, measures the bytes that steps and graphs need. Not called if `config`
            sets the size.

    Raises:
        ValueError: Not even one sequence of `max_model_len` tokens fits.
    """
    block_bytes = spec.num_layers * form.token_bytes(spec.kv_shape) * sizes.block_size
    one = -(-max_model_len // sizes.block_size)
    num_ranks = config.coord.mesh.num_ranks
    if config.kv_cache_mib is not None:
        num_blocks = (config.kv_cache_mib << 20) // num_ranks // block_bytes
    else:
        num_blocks = _available_bytes(config, device, profile) // block_bytes
        if device.type == "cpu":  # the ranks share the memory of the host
            num_blocks = min(num_blocks // num_ranks, one * sizes.max_sequences)
    if num_blocks < one:
        needed = -(-one * block_bytes >> 20)
        raise ValueError(
            f"too little memory for one sequence of {max_model_len} tokens: its KV cache needs "
            f"{needed} MiB, but there is room for {num_blocks * block_bytes >> 20} MiB. Lower "
            "max_model_len, or raise kv_cache_mib if the machine has more"
        )
    return num_blocks


def _available_bytes(
    config: WorkerConfig, device: torch.device, profile: Callable[[], int] | None
) -> int:
    if device.type == "cuda":
        if profile is None:
            return _available_on_gpu(device, 0, _GPU_FRACTION)
        return _available_on_gpu(device, profile(), _GPU_FRACTION_OF_REST)
    fraction = _CPU_FRACTION
    if config.threads and config.max_threads:
        fraction = min(fraction, _SHARED_CPU_FRACTION * config.fraction_of_cores)
    return int(available_bytes() * fraction)


def _available_on_gpu(device: torch.device, needed: int, fraction: float) -> int:
    """Return `fraction` of the memory that steps and KV transfers leave free, in bytes.

    `needed` is the memory that steps need.
    """
    free = torch.cuda.mem_get_info(device)[0]
    return max(0, int((free - needed - reserved_bytes()) * fraction))
