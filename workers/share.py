"""What one rank has of a worker: its share of the model, and of the cache, with the others' known.

A worker of one rank has all of both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch._C._distributed_c10d import Store

from penstock.workers.config import WorkerConfig
from penstock.workers.device.ladder import Ladder
from penstock.workers.device.runner import DeviceRunner
from penstock.workers.device.trial import Sizes, bytes_beside
from penstock.workers.fingerprint import layout_of
from penstock.workers.kv_cache import KvCache
from penstock.workers.memory import choose_num_blocks
from penstock.workers.models.served import ServedModel, ServedSpec
from penstock.workers.parallel.blocks import BlockLine, SpreadStaging, connect_blocks
from penstock.workers.parallel.mesh import Place
from penstock.workers.parallel.plan_channel import (
    PlanReader,
    PlanWriter,
    node_name,
    read_plans,
    write_plans,
)
from penstock.workers.parallel.plans import most_bytes
from penstock.workers.parallel.ranks import ALONE, join, least
from penstock.workers.runner import Runner
from penstock.workers.scheduling.limits import Limits
from penstock.workers.transfer.shards import Rectangle
from penstock.workers.transfer.staging import KvStaging, Staging
from penstock.workers.weights.loading import load
from penstock.workers.weights.sharding import kv_heads

Progress = Callable[[int, int], None]
"""Told how much is done, and of how much: bytes of weights read, or graphs captured."""


@dataclass(frozen=True, slots=True)
class Share:
    config: WorkerConfig
    spec: ServedSpec  # of the whole model
    decoder: ServedModel
    limits: Limits
    cache: KvCache
    line: BlockLine | None  # to the other ranks, if there are any

    def runner(self) -> Runner:
        """What computes steps on it. On a GPU, of a worker that has no other: without waiting."""
        limits = self.limits
        if not _computes_by_itself(self.config, self.decoder):
            return Runner(self.decoder, self.cache, self.config.deterministic)
        ladder = Ladder(limits.max_sequences, limits.max_model_len)
        return DeviceRunner(self.decoder, self.cache, ladder)

    def staging(self) -> KvStaging:
        """Of what this rank has of the KV blocks."""
        return KvStaging(self.cache.data, _rectangle(self.spec, self.config.place))

    def whole_staging(self, plans: PlanWriter | None) -> Staging:
        """Of the whole worker's KV blocks, for the rank that leads."""
        if plans is None or self.line is None:
            return self.staging()
        mesh = self.config.place.mesh
        rectangles = [_rectangle(self.spec, mesh.place(rank)) for rank in range(mesh.num_ranks)]
        return SpreadStaging(self.staging(), rectangles, self.line, plans.write)

    def layout(self, model: str) -> str:
        """Of the whole worker's KV blocks, with that fingerprint of its model."""
        dtype, deterministic = self.decoder.dtype, self.config.deterministic
        return layout_of(model, self.spec, dtype, self.limits.block_size, deterministic)

    def lead(self, store: Store | None) -> PlanWriter | None:
        """How to tell the others what to compute; waits until they listen."""
        config = self.config
        num_ranks, limits = config.place.mesh.num_ranks, self.limits
        if store is None or num_ranks == 1:
            return None
        num_columns = -(-limits.max_model_len // limits.block_size)
        size = most_bytes(limits.max_sequences, limits.max_batched_tokens, num_columns)
        seconds = config.ranks_seconds
        return write_plans(store, num_ranks, size, node_name(), config.host, seconds)

    def follow(self, store: Store) -> PlanReader:
        """How to be told it."""
        config = self.config
        num_ranks = config.place.mesh.num_ranks
        return read_plans(store, config.rank, num_ranks, node_name(), config.host)


def take_share(
    config: WorkerConfig,
    progress: Progress,
    store: Store | None,
    decoder: ServedModel | None = None,
) -> Share:
    """Load it. If there are other ranks, they are met in `store` (`RankLost` if they do not come).

    decoder: a whole model that is there already, with no other rank.
    Where it cannot be, a ValueError says why in one line.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device, place = choose_device(config.device), config.place
    ranks, line = ALONE, None
    if place.mesh.num_ranks > 1:
        assert store is not None
        ranks = join(place, store, device, config.host, config.ranks_seconds)
        line = connect_blocks(store, place, config.host, config.ranks_seconds)
    if decoder is not None:
        spec = decoder.spec
    else:
        spec, decoder = load(
            config.model,
            config.dtype,
            device,
            progress,
            config.max_model_len,
            config.quantization,
            config.deterministic,
            ranks,
        )
    limits = _limits(config, spec, decoder, store)
    num_scratch = 1 if _computes_by_itself(config, decoder) else 0
    return Share(config, spec, decoder, limits, _make_cache(limits, decoder, num_scratch), line)


def _computes_by_itself(config: WorkerConfig, decoder: ServedModel) -> bool:
    """Whether a device computes while nobody waits: a GPU does, as long as no other rank is met."""
    return decoder.device.type == "cuda" and config.place.mesh.num_ranks == 1


def _rectangle(spec: ServedSpec, place: Place) -> Rectangle:
    """What a rank has of the model's keys and values."""
    layers, heads = place.layers(spec.num_layers), kv_heads(spec, place)
    return Rectangle(layers.start, layers.stop, heads.start, heads.stop)


def choose_device(name: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here; ValueError if there is no GPU."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("device is cuda, but torch sees no CUDA device here: use cpu or auto")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def _limits(
    config: WorkerConfig, spec: ServedSpec, decoder: ServedModel, store: Store | None
) -> Limits:
    max_model_len = config.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise ValueError(
            f"max_model_len {max_model_len} is more than the {spec.max_model_len} positions that "
            "the model has"
        )
    sizes = Sizes(config.max_sequences, config.max_batched_tokens, max_model_len, config.block_size)
    num_blocks = choose_num_blocks(
        config,
        decoder.spec,
        max_model_len,
        decoder.device,
        decoder.dtype.itemsize,
        partial(bytes_beside, decoder, sizes) if _computes_by_itself(config, decoder) else None,
    )
    if store is not None and config.place.mesh.num_ranks > 1:
        num_blocks = least(store, "blocks", config.place, num_blocks)
    return Limits(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=config.block_size,
        max_sequences=config.max_sequences,
        max_batched_tokens=config.max_batched_tokens,
        max_queued=config.max_queued,
        static=config.static_batching,
        num_stages=config.pp,
    )


def _make_cache(limits: Limits, decoder: ServedModel, num_scratch: int) -> KvCache:
    spec = decoder.spec
    return KvCache(
        num_layers=spec.num_layers,
        num_blocks=limits.num_blocks + num_scratch,
        block_size=limits.block_size,
        kv_shape=spec.kv_shape,
        dtype=decoder.dtype,
        device=decoder.device,
    )
