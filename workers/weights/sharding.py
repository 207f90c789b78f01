"""Divides a model among ranks: the spec of each rank's shard, and the tensor regions to load.

Column-parallel layers, whose outputs are heads or intermediate features, divide their outputs among
the ranks. Row-parallel layers, whose outputs are hidden states, divide their inputs, and an
all-reduce sums the results. If there are more ranks than KV heads, several ranks hold a copy of the
same KV head.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias

from penstock.workers.models.alibi import AlibiSpec
from penstock.workers.models.config import Fields
from penstock.workers.models.spec import (
    ExpertsSpec,
    ModelSpec,
    is_native,
    read_config,
    read_spec,
)
from penstock.workers.parallel.mesh import BadShape, Mesh, MeshCoord
from penstock.workers.weights.regions import Ranges, Region


def check_folder(folder: Path, mesh: Mesh) -> None:
    """Raise `BadShape` if the mesh cannot divide the model of a checkpoint.

    The exceptions of `read_spec` are raised as well.
    """
    config = read_config(folder)
    check_native(config, mesh)
    if is_native(config):
        check_shape(read_spec(folder), mesh)


def check_native(config: Fields, mesh: Mesh) -> None:
    """Raise `BadShape` if several ranks are requested for a model that `transformers` runs."""
    if mesh.num_ranks > 1 and not is_native(config):
        raise BadShape(
            f"tp {mesh.tp}, pp {mesh.pp}: {config.values['architectures'][0]} runs through "
            "transformers, which supports one rank only: use tp 1 and pp 1"
        )


def check_shape(spec: ModelSpec, mesh: Mesh) -> None:
    """Raise `BadShape` if the mesh cannot divide the model."""
    tp, pp, ep = mesh.tp, mesh.pp, mesh.ep
    if pp > spec.num_layers:
        raise BadShape(f"pp {pp} is more than the model's {spec.num_layers} layers")
    if ep > 1 and spec.experts is None:
        raise BadShape(f"ep {ep} cannot be used with a model without experts: set ep to 1")
    if spec.experts is not None and ep > spec.experts.num_experts:
        raise BadShape(f"ep {ep} is more than the model's {spec.experts.num_experts} experts")
    if spec.latent is None and spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        raise BadShape(f"tp {tp} is neither a divisor nor a multiple of {spec.num_kv_heads}, the "
                       "model's number of KV heads")  # fmt: skip
    if spec.qk_norm == "whole" and tp > 1:
        raise BadShape(f"tp {tp}: {spec.family} normalises all heads together, so it needs tp 1")
    for size, per, what in _cut_sizes(spec, mesh):
        if size % per:
            raise BadShape(f"{_divisor(mesh, per)} does not divide the model's {size} {what}")


def _divisor(mesh: Mesh, per: int) -> str:
    return f"tp {per}" if per == mesh.tp else f"tp / ep = {mesh.tp} / {mesh.ep} = {per}"


def _cut_sizes(spec: ModelSpec, mesh: Mesh) -> Iterator[tuple[int, int, str]]:
    yield spec.num_heads, mesh.tp, "attention heads"
    experts = spec.experts
    if experts is None or not all(experts.layers):
        yield spec.intermediate_size, mesh.tp, "feed-forward features"
    if experts is not None:
        yield experts.inner_size, mesh.expert_tp, "features of an expert"
        yield experts.shared_size, mesh.tp, "features of the shared expert"


def local_spec(spec: ModelSpec, coord: MeshCoord) -> ModelSpec:
    """Return the spec of one rank's shard, with the rank's layers, heads and features.

    The vocabulary size and the number of experts remain those of the whole model. Raise `BadShape`
    if the ranks cannot divide the model.
    """
    check_shape(spec, coord.mesh)
    layers = coord.layers(spec.num_layers)
    here = slice(layers.start, layers.stop)
    return replace(
        spec,
        num_layers=len(layers),
        num_heads=spec.num_heads // coord.mesh.tp,
        num_kv_heads=max(1, spec.num_kv_heads // coord.mesh.tp),
        intermediate_size=spec.intermediate_size // coord.mesh.tp,
        windows=spec.windows[here],
        alibi=None if spec.alibi is None else _local_alibi(spec.alibi, coord),
        experts=None if spec.experts is None else _local_experts(spec.experts, coord, here),
    )


def _local_alibi(alibi: AlibiSpec, coord: MeshCoord) -> AlibiSpec:
    num_heads = len(alibi.slopes) // coord.mesh.tp
    first = num_heads * coord.tp_rank
    return replace(alibi, slopes=alibi.slopes[first : first + num_heads])


def _local_experts(experts: ExpertsSpec, coord: MeshCoord, here: slice) -> ExpertsSpec:
    return replace(
        experts,
        inner_size=experts.inner_size // coord.mesh.expert_tp,
        shared_size=experts.shared_size // coord.mesh.tp,
        layers=experts.layers[here],
    )


class HasHeads(Protocol):
    """Interface of specs that give the shape of the KV cache: see `ModelSpec.kv_shape`."""

    @property
    def kv_shape(self) -> tuple[int, int, int]: ...


def kv_heads(spec: HasHeads, coord: MeshCoord) -> range:
    """Return the KV heads of a rank; with MLA, every rank has the only KV head."""
    num_heads = spec.kv_shape[1]
    first = num_heads * coord.tp_rank // coord.mesh.tp
    return range(first, first + max(1, num_heads // coord.mesh.tp))


def region_shape(shape: tuple[int, ...], region: Region) -> tuple[int, ...]:
    """Return the shape of a region of a tensor of shape `shape`."""
    axis_ranges = [None if at >= len(region) else region[at] for at in range(len(shape))]
    return tuple(
        size if ranges is None else sum(last - first for first, last in ranges)
        for size, ranges in zip(shape, axis_ranges, strict=True)
    )


def regions(spec: ModelSpec, coord: MeshCoord) -> dict[str, Region]:
    """Return the region of each tensor of which a rank has only a part, by checkpoint name.

    Args:
        spec: Spec of the whole model.
    """
    if coord.mesh.tp == 1:
        return {}
    names, words = spec.names, coord.tokens(spec.vocab_size)
    vocabulary = ((words.start, words.stop),)
    found: dict[str, Region] = {
        f"{names.embeddings}.weight": (vocabulary,),
        f"{names.head}.weight": (vocabulary,),
        f"{names.head}.bias": (vocabulary,),
    }
    cut = _Cut(spec, coord)
    for layer in coord.layers(spec.num_layers):
        in_layer = dict(cut.attention())
        if spec.experts is not None and spec.experts.layers[layer]:
            in_layer.update(cut.experts(spec.experts))
        else:
            in_layer.update(cut.mlp(names.mlp, names.gate_up, names.down))
        found |= {f"{names.layers}.{layer}.{name}": region for name, region in in_layer.items()}
    return found


TensorRegions: TypeAlias = Iterator[tuple[str, Region]]


class _Cut:
    """Yields a rank's regions of one layer's tensors, by names relative to the layer."""

    def __init__(self, spec: ModelSpec, coord: MeshCoord) -> None:
        self._spec = spec
        self._coord = coord

    def attention(self) -> TensorRegions:
        spec, names = self._spec, self._spec.names
        if spec.latent is not None:
            query = names.query_up if spec.latent.query_rank else names.qkv[0]
            yield from _outputs(query, self._heads(spec.head_dim))
            yield from _outputs(names.row_up, self._heads(spec.latent.up_dim))
            yield from _inputs(names.output, self._heads(spec.latent.value_dim))
            return
        yield from self._qkv()
        yield from _inputs(names.output, self._heads(spec.head_dim))
        yield names.sinks, (self._heads(1),)

    def _heads(self, size: int) -> Ranges:
        """Return the rows of this rank's query heads, with `size` rows per head."""
        num = self._spec.num_heads // self._coord.mesh.tp
        start = num * self._coord.tp_rank
        return ((start * size, (start + num) * size),)

    def _qkv(self) -> TensorRegions:
        spec, size = self._spec, self._spec.head_dim
        kept = kv_heads(spec, self._coord)
        keys = ((kept.start * size, kept.stop * size),)
        if len(spec.names.qkv) == 3:
            for name, rows in zip(spec.names.qkv, (self._heads(size), keys, keys), strict=True):
                yield from _outputs(name, rows)
        elif spec.qkv_grouped:
            yield from _outputs(spec.names.qkv[0], self._grouped(kept))
        else:
            first, second = spec.num_heads * size, (spec.num_heads + spec.num_kv_heads) * size
            ((start, stop),) = keys
            rows = (first + start, first + stop), (second + start, second + stop)
            yield from _outputs(spec.names.qkv[0], self._heads(size) + rows)

    def _grouped(self, kept: range) -> Ranges:
        """Return the QKV rows of the KV heads `kept` if the checkpoint groups the rows by KV head.

        A group has the query heads, the key and the value of one KV head. If several ranks hold the
        same KV head, each of these ranks has some of the head's query heads.
        """
        spec, size = self._spec, self._spec.head_dim
        group = spec.num_heads // spec.num_kv_heads
        num = spec.num_heads // self._coord.mesh.tp // len(kept)
        found = []
        for head in kept:
            first = head * (group + 2)
            query = first + (num * self._coord.tp_rank) % group
            found += [(query * size, (query + num) * size)]
            found += [((first + group) * size, (first + group + 2) * size)]
        return tuple(found)

    def mlp(self, prefix: str, gate_up: tuple[str, ...], down: str) -> TensorRegions:
        inner, tp = self._spec.intermediate_size, self._coord.mesh.tp
        yield from self._feed_forward(prefix, gate_up, down, (inner, tp, self._coord.tp_rank))

    def _feed_forward(
        self, prefix: str, gate_up: tuple[str, ...], down: str, cut: tuple[int, int, int]
    ) -> TensorRegions:
        """Yield the regions of an MLP.

        Args:
            cut: (number of intermediate features of all ranks, number of parts, index of this
                rank's part).
        """
        inner, num, column = cut
        first, last = inner // num * column, inner // num * (column + 1)
        rows: Ranges = ((first, last),)
        if self._spec.gated and len(gate_up) == 1:
            rows += ((inner + first, inner + last),)
        for name in gate_up:
            yield from _outputs(f"{prefix}.{name}", rows)
        yield from _inputs(f"{prefix}.{down}", ((first, last),))

    def experts(self, experts: ExpertsSpec) -> TensorRegions:
        names, coord = self._spec.names, self._coord
        num, column = coord.mesh.expert_tp, coord.expert_tp_rank
        if experts.clamp is not None:
            yield from self._stacks(experts)
            return
        cut = (experts.inner_size, num, column)
        for expert in coord.experts(experts.num_experts):
            prefix = f"{names.experts}.experts.{expert}"
            yield from self._feed_forward(prefix, names.expert_gate_up, names.expert_down, cut)
        if experts.shared_size:
            cut = (experts.shared_size, coord.mesh.tp, coord.tp_rank)
            prefix = f"{names.experts}.{names.shared}"
            yield from self._feed_forward(prefix, names.gate_up, names.down, cut)

    def _stacks(self, experts: ExpertsSpec) -> TensorRegions:
        """Yield the regions of gpt-oss's stacks, in which gate and up outputs are interleaved."""
        coord, prefix = self._coord, f"{self._spec.names.experts}.experts"
        mine = coord.experts(experts.num_experts)
        num = experts.inner_size // coord.mesh.expert_tp
        first, last = num * coord.expert_tp_rank, num * (coord.expert_tp_rank + 1)
        own: Ranges = ((mine.start, mine.stop),)
        pairs: Ranges = ((2 * first, 2 * last),)
        yield f"{prefix}.gate_up_proj", (own, None, pairs)
        yield f"{prefix}.gate_up_proj_bias", (own, pairs)
        yield f"{prefix}.down_proj", (own, ((first, last),))
        yield f"{prefix}.down_proj_bias", (own,)


def stack_cut(region: Region, count: int) -> tuple[range, Ranges | None, Ranges | None]:
    """Return a rank's experts, inputs and outputs (None: all) of a stack [experts, in, out].

    Args:
        region: the rank's region of the stack; empty: all of it.
        count: number of experts of the whole model.
    """
    experts, inputs, outputs = (*region, None, None, None)[:3]
    return range(*experts[0]) if experts is not None else range(count), inputs, outputs


def _outputs(name: str, rows: Ranges) -> TensorRegions:
    yield f"{name}.weight", (rows,)
    yield f"{name}.bias", (rows,)


def _inputs(name: str, columns: Ranges) -> TensorRegions:
    """Yield the region of a row-parallel weight. One rank adds the bias, which is not divided."""
    yield f"{name}.weight", (None, columns)
