"""Everything that one rank owns: model shard, KV cache and channels to the other ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.kernels.attention.backends.choice import choose_attention_backend
from penstock.kernels.attention.backends.interface import AttentionBackend
from penstock.kernels.background_compilation import BackgroundLoader
from penstock.kernels.kv_cache.format import KvCacheFormat
from penstock.kernels.triton_common.tuned_tiles import load_tuned_tiles
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.gpu.attention_request import attention_request
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.gpu.graph_buckets import GraphBuckets
from penstock.workers.gpu.memory_profile import StepLimits, profile_step_bytes
from penstock.workers.kv_transfer.rank_mover import Movers, RankMover
from penstock.workers.kv_transfer.shards import LayerHeadRange
from penstock.workers.kv_transfer.staging import KvStaging
from penstock.workers.layers.expert_parallel import ExpertParallelMoE
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.protocols import Model, ModelInfo
from penstock.workers.models.spec import ModelSpec, is_native, read_config, read_spec
from penstock.workers.parallel.communicator import Communicator
from penstock.workers.parallel.mesh import MeshCoord
from penstock.workers.parallel.parallel_groups import SINGLE_RANK, all_reduce_min, connect_ranks
from penstock.workers.parallel.remote_movers import OrderQueue, Reporter, make_remote_movers
from penstock.workers.parallel.step_broadcast import (
    PlanReader,
    PlanWriter,
    connect_hosts,
    connect_plan_reader,
    connect_plan_writer,
    node_name,
)
from penstock.workers.parallel.step_codec import max_plan_bytes
from penstock.workers.rank.cpu_kernels import kernel_needs, load_cpu_kernels
from penstock.workers.rank.fingerprint import layout_of, numerics_of
from penstock.workers.rank.kv_cache import KvCache, check_cache_format, choose_cache_format
from penstock.workers.rank.kv_cache_size import choose_num_blocks
from penstock.workers.rank.prompt_batching import enough_prompt_tokens
from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.weights.loading import load
from penstock.workers.weights.sharding import kv_heads

ProgressCallback = Callable[[int, int], None]
"""Callback with (done, total): the number of bytes of weights read so far, or of graphs captured so
far, and the total number."""

COMPILING = "compiling CPU kernels, first start only"
WARMING_UP = "warming up"
"""Names of start-up stages that are reported."""


@dataclass(frozen=True, slots=True)
class RankRuntime:
    """A loaded rank, with methods that create its runner, KV movers and channels."""

    config: WorkerConfig
    spec: ModelInfo  # spec of the whole model
    decoder: Model  # this rank's shard
    limits: SchedulerConfig
    cache: KvCache
    reports: Communicator | None  # communicator between the ranks' hosts, for KV transfer reports
    # attention backend of a GPU; None: steps run on a CPU
    attention: AttentionBackend | None = None
    # loads deferred CPU kernels; must be started after the warm-up
    deferred: BackgroundLoader | None = None

    def runner(self) -> ModelRunner:
        """Create the model runner; on a GPU, the runner is asynchronous."""
        limits = self.limits
        if not _runs_asynchronously(self.decoder):
            return ModelRunner(self.decoder, self.cache, self.config.deterministic)
        several = bool(self.attention and self.attention.grids_follow_context)
        ladder = GraphBuckets(limits.max_sequences, limits.max_model_len, several)
        deterministic = self.config.deterministic
        return DeviceRunner(self.decoder, self.cache, ladder, deterministic, self.attention)

    def mover(self) -> RankMover:
        """Create the mover of this rank's shard of the KV blocks."""
        config = self.config
        staging = KvStaging(self.cache.data, _layer_heads(self.spec, config.coord))
        return RankMover(staging, config.host, config.transfer_seconds)

    def movers(self, plans: PlanWriter | None) -> Movers:
        """Create the mover of rank 0 and, with several ranks, the remote movers of the others.

        Args:
            plans: the broadcast of step plans, or None if the worker has only one rank.
        """
        if plans is None or self.reports is None:
            return Movers(self.mover())
        mesh = self.config.coord.mesh
        rectangles = [_layer_heads(self.spec, mesh.coord(rank)) for rank in range(mesh.num_ranks)]
        others = make_remote_movers(rectangles, OrderQueue(plans.write), self.reports)
        return Movers(self.mover(), others)

    def reporter(self) -> Reporter:
        """Create the sender of KV transfer reports to rank 0."""
        assert self.reports is not None
        return Reporter(self.reports, self.config.ranks_seconds)

    def layout(self, model: str) -> str:
        """Return the layout string of the worker's KV; `model` is the model's fingerprint."""
        forms, numerics = (self.decoder.dtype, self.cache.form), ""
        if self.config.deterministic:
            mesh = self.config.coord.mesh
            numerics = numerics_of(self.limits.block_size, self.decoder.device, mesh)
        methods = self.decoder.linear_methods if isinstance(self.decoder, Decoder) else "float"
        return layout_of(model, self.spec, *forms, numerics, methods)

    def expert_counts(self) -> list[Tensor]:
        """Return, for each MoE layer of this rank, how often each expert was chosen ([E] int64).

        The list is empty if `tp` is 1, or if `transformers` runs the model.
        """
        if not isinstance(self.decoder, Decoder):
            return []
        mlps = [block.mlp for block in self.decoder.layers]
        return [mlp.load for mlp in mlps if isinstance(mlp, ExpertParallelMoE)]

    def connect_as_leader(self, store: Store | None) -> PlanWriter | None:
        """Create the broadcast of step plans and wait for the other ranks.

        Return None if the worker has only one rank.
        """
        config = self.config
        num_ranks, limits = config.coord.mesh.num_ranks, self.limits
        if store is None or num_ranks == 1:
            return None
        num_columns = -(-limits.max_model_len // limits.block_size)
        size = max_plan_bytes(limits.max_sequences, limits.max_batched_tokens, num_columns)
        seconds = config.ranks_seconds
        return connect_plan_writer(store, num_ranks, size, node_name(), config.host, seconds)

    def connect_as_follower(self, store: Store) -> PlanReader:
        """Create the reader of rank 0's step plans."""
        config = self.config
        num_ranks = config.coord.mesh.num_ranks
        return connect_plan_reader(store, config.rank, num_ranks, node_name(), config.host)


def load_rank(
    config: WorkerConfig,
    progress: ProgressCallback,
    store: Store | None,
    decoder: Model | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> RankRuntime:
    """Load one rank of a worker and connect it to the other ranks, if there are any.

    Args:
        store: Rendezvous store of the ranks; None for a worker with one rank.
        decoder: A complete model that is already loaded, for a worker with one rank.
        on_stage: Called with `COMPILING` while CPU kernels are compiled, then with `WARMING_UP`.

    Raises:
        ValueError: The configuration is not supported here; the message is one line.
        RankLost: Another rank failed or did not connect.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device, coord = choose_device(config.device), config.coord
    ranks, reports = SINGLE_RANK, None
    if coord.mesh.num_ranks > 1:
        assert store is not None
        # Add in rank order on a CPU too: results then do not depend on gloo's order of additions.
        in_rank_order = config.deterministic or device.type == "cpu"
        ranks = connect_ranks(
            coord, store, device, config.host, config.ranks_seconds, in_rank_order
        )
        num_ranks = coord.mesh.num_ranks
        reports = connect_hosts(store, "reports", coord.rank, num_ranks, config.host)
    if not config.deterministic:
        load_tuned_tiles(device)
    needs = None if decoder is not None else kernel_needs(config, device)
    loops, deferred = load_cpu_kernels(
        needs, config.compile_in_background, lambda: on_stage(COMPILING)
    )

    def report_progress(done: int, total: int) -> None:
        progress(done, total)
        if done >= total and loops.compiles:
            on_stage(COMPILING)

    if decoder is not None:
        spec = decoder.spec
    else:
        model_config = read_config(config.model)
        if is_native(model_config):
            check_cache_format(config.kv_cache_dtype, read_spec(config.model))
        spec, decoder = load(
            config.model,
            config.dtype,
            device,
            report_progress,
            config.max_model_len,
            config.quantization,
            config.deterministic,
            ranks,
        )
    names = config.kv_cache_dtype, config.quantization
    form = choose_cache_format(*names, decoder.dtype, decoder.device)
    attention = _choose_attention(config, decoder, form, store)
    limits = _limits(config, spec, decoder, form, store, attention)
    loops.join()
    if loops.has_compiled:
        on_stage(WARMING_UP)
    num_scratch = 1 if _runs_asynchronously(decoder) else 0
    cache = _make_cache(limits, decoder, form, num_scratch)
    return RankRuntime(config, spec, decoder, limits, cache, reports, attention, deferred)


def _choose_attention(
    config: WorkerConfig, decoder: Model, form: KvCacheFormat, store: Store | None
) -> AttentionBackend | None:
    """Choose and log the attention backend; return None if steps run on a CPU.

    All ranks choose the same backend, because the backend affects which graphs are captured.
    """

    def on_all_ranks(usable: bool) -> bool:
        if store is None or config.coord.mesh.num_ranks == 1:
            return usable
        return bool(all_reduce_min(store, "attention", config.coord, int(usable)))

    sizes = config.step_sizes(_gpu_memory(decoder.device))
    request = attention_request(
        decoder, form.dtype, sizes.block_size, sizes.max_sequences, config.deterministic
    )
    name, device = config.attention_backend, decoder.device
    backend = choose_attention_backend(name, request, device, on_all_ranks)
    return backend if _runs_asynchronously(decoder) else None


def _runs_asynchronously(decoder: Model) -> bool:
    """Return True if steps run asynchronously: on a GPU."""
    return decoder.device.type == "cuda"


def _layer_heads(spec: ModelInfo, coord: MeshCoord) -> LayerHeadRange:
    """Return the layers and KV heads of a rank."""
    layers, heads = coord.layers(spec.num_layers), kv_heads(spec, coord)
    return LayerHeadRange(layers.start, layers.stop, heads.start, heads.stop)


def choose_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda". Raises ValueError for "cuda" without a GPU."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError(
            "device is cuda, but torch sees no CUDA device here: set device to 'cpu' or 'auto'"
        )
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def _enough_prompt_tokens(config: WorkerConfig, spec: ModelInfo, device: torch.device) -> int:
    """Return the limit of `SchedulerConfig`; an operator's `max_batched_tokens` replaces it."""
    is_chosen = config.max_batched_tokens is not None
    if is_chosen or device.type != "cpu" or not isinstance(spec, ModelSpec):
        return 0
    return enough_prompt_tokens(spec, torch.get_num_threads() * config.coord.mesh.num_ranks)


def _limits(
    config: WorkerConfig,
    spec: ModelInfo,
    decoder: Model,
    form: KvCacheFormat,
    store: Store | None,
    attention: AttentionBackend | None,
) -> SchedulerConfig:
    """Choose the scheduler's limits; `form` is the format of the KV cache."""
    max_model_len = config.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise ValueError(
            f"max_model_len {max_model_len} is more than the {spec.max_model_len} positions that "
            "the model supports"
        )
    coord, memory = config.coord, _gpu_memory(decoder.device)
    if memory is not None and store is not None and coord.mesh.num_ranks > 1:
        # use the minimum, because all ranks need the same sizes
        memory = all_reduce_min(store, "memory", coord, memory)
    sizes = config.step_sizes(memory)
    steps = StepLimits(
        sizes.max_sequences, sizes.max_batched_tokens, max_model_len, sizes.block_size
    )
    num_blocks = choose_num_blocks(
        config,
        sizes,
        decoder.spec,
        max_model_len,
        decoder.device,
        form,
        partial(profile_step_bytes, decoder, form, steps, config.deterministic, attention)
        if _runs_asynchronously(decoder)
        else None,
    )
    if store is not None and coord.mesh.num_ranks > 1:
        num_blocks = all_reduce_min(store, "blocks", coord, num_blocks)
    return SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=sizes.block_size,
        max_sequences=sizes.max_sequences,
        max_batched_tokens=sizes.max_batched_tokens,
        enough_prompt_tokens=_enough_prompt_tokens(config, spec, decoder.device),
        max_queued=config.max_queued,
        tpot_slo_seconds=config.tpot_slo_seconds,
        static=config.static_batching,
        hash_key=config.hash_key,
        num_stages=config.pp,
    )


def _gpu_memory(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes; None for a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _make_cache(
    limits: SchedulerConfig, decoder: Model, form: KvCacheFormat, num_scratch: int
) -> KvCache:
    spec = decoder.spec
    return KvCache(
        num_layers=spec.num_layers,
        num_blocks=limits.num_blocks + num_scratch,
        block_size=limits.block_size,
        kv_shape=spec.kv_shape,
        form=form,
        device=decoder.device,
    )
