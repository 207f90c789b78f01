"""How many KV blocks a worker has."""

from collections.abc import Callable

import torch

from penstock.workers.config import WorkerConfig
from penstock.workers.models.protocols import ModelInfo

_CPU_FRACTION = 0.25  # of what is available: other workers and the router live there too
_GPU_FRACTION = 0.85  # of what the weights left, where what a step needs is not tried out
_GPU_FRACTION_OF_REST = 0.97  # where it is: communicators, and odd ends


def choose_num_blocks(
    config: WorkerConfig,
    spec: ModelInfo,
    max_model_len: int,
    device: torch.device,
    itemsize: int,
    profile: Callable[[], int] | None = None,
) -> int:
    """As many as `config` says or memory allows; on a CPU no more than all sequences could fill.

    spec: of the model as this rank computes it; itemsize: of the cache. Ranks share what a worker
    may have, evenly.
    beside: finds the bytes that a GPU needs for steps and graphs; asked where memory decides.
    ValueError if not even one sequence of `max_model_len` tokens would fit.
    """
    block_bytes = spec.kv_bytes_per_token(itemsize) * config.block_size
    one = -(-max_model_len // config.block_size)
    num_ranks = config.coord.mesh.num_ranks
    if config.kv_cache_mib is not None:
        num_blocks = (config.kv_cache_mib << 20) // num_ranks // block_bytes
    else:
        num_blocks = _available_bytes(device, profile) // block_bytes
        if device.type == "cpu":  # whose memory is everybody's
            num_blocks = min(num_blocks // num_ranks, one * config.max_sequences)
    if num_blocks < one:
        needed = -(-one * block_bytes >> 20)
        raise ValueError(
            f"too little memory for one sequence of {max_model_len} tokens: its KV takes "
            f"{needed} MiB and there is room for {num_blocks * block_bytes >> 20} MiB. Lower "
            "max_model_len, or raise kv_cache_mib if the machine has more"
        )
    return num_blocks


def _available_bytes(device: torch.device, profile: Callable[[], int] | None) -> int:
    if device.type == "cuda":
        if profile is None:
            return int(torch.cuda.mem_get_info(device)[0] * _GPU_FRACTION)
        needed = profile()
        return max(0, int((torch.cuda.mem_get_info(device)[0] - needed) * _GPU_FRACTION_OF_REST))
    import psutil  # not where only GPUs compute, see docs/gpu.md

    return int(psutil.virtual_memory().available * _CPU_FRACTION)
