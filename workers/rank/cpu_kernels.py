"""Loads the compiled CPU kernels of a rank, some of them while the worker already serves."""

from collections.abc import Callable

import torch

from penstock.kernels.background_compilation import BackgroundLoader
from penstock.kernels.cpu_compilation import (
    CpuKernelLoader,
    CpuKernelNeeds,
    Products,
    deferrable_groups,
    required_groups,
)
from penstock.kernels.linear.quantized import has_int4_products
from penstock.workers.config import WorkerConfig
from penstock.workers.models.quantization import read_quantization
from penstock.workers.models.spec import is_native, read_config, read_spec
from penstock.workers.models.weight_scheme import WeightScheme
from penstock.workers.rank.kv_cache import choose_cache_format
from penstock.workers.weights.gguf.packed_blocks import has_packable_blocks, keeps_blocks
from penstock.workers.weights.loading import choose_dtype
from penstock.workers.weights.quantized_method import has_int4_groups


def kernel_needs(config: WorkerConfig, device: torch.device) -> CpuKernelNeeds | None:
    """Return the needs of a rank; None on a GPU, or if `config` is invalid."""
    if device.type != "cpu":
        return None
    try:
        dtype = choose_dtype(config.dtype, "float32", device)
        form = choose_cache_format(config.kv_cache_dtype, config.quantization, dtype, device)
        model_config = read_config(config.model)
        quantization = read_quantization(model_config)
        experts = is_native(model_config) and read_spec(config.model).experts is not None
    except ValueError:
        return None
    single_rank = config.coord.mesh.num_ranks == 1
    schemes = [] if quantization is None else [rule.scheme for rule in quantization.rules]
    products = _online_products(config.quantization).union(*map(_products, schemes))
    if "int4" in products and not has_int4_products(device, dtype):
        products = products - {"int4"} | {"weight-only"}
    if "int4" in products and not single_rank:
        products.add("weight-only")  # for ranks whose inputs begin inside a quantization group
    keeps = keeps_blocks(
        config.model, config.quantization, config.deterministic, device, dtype
    ) and has_packable_blocks(config.model)
    if keeps:
        products.add("weight-only")
    return CpuKernelNeeds(
        weights=str(dtype).removeprefix("torch."),
        kv_cache=form.name,
        products=tuple(sorted(products)),
        deterministic=config.deterministic,
        single_rank=single_rank,
        experts=experts,
    )


def load_cpu_kernels(
    needs: CpuKernelNeeds | None, in_background: bool, notify: Callable[[], None]
) -> tuple[CpuKernelLoader, BackgroundLoader | None]:
    """Start to load the groups of loops that a rank needs.

    Args:
        needs: the needs of the rank; None: nothing is loaded.
        in_background: defer the groups that the rank can do without at first. The caller must
            start the `BackgroundLoader` after the warm-up.
        notify: see `CpuKernelLoader`.
    """
    groups = [] if needs is None else required_groups(needs)
    if needs is None or not in_background:
        return CpuKernelLoader(groups, notify), None
    deferred = deferrable_groups(groups, needs)
    later = BackgroundLoader(needs, deferred)
    return CpuKernelLoader([each for each in groups if each not in deferred], notify), later


def _products(scheme: WeightScheme) -> set[Products]:
    """Return the kind of products that a quantized checkpoint needs on the best CPUs."""
    if scheme.allows_int8_products:
        return {"int8"}
    return {"int4"} if has_int4_groups(scheme) else {"weight-only"}


def _online_products(quantization: str) -> set[Products]:
    """Return the kinds of products that a value of `--quantization` needs."""
    if quantization == "int8":
        return {"int8"}
    if quantization == "int4":
        return {"int4"}
    return {"weight-only"} if quantization == "fp8" else set()
