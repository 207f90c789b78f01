"""Loads a checkpoint folder, or a GGUF file, into a model."""

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from io import BufferedReader
from pathlib import Path

import torch

from penstock.common.gguf.checkpoint import is_gguf, open_gguf
from penstock.kernels.linear.quantized import supports_dequantizing
from penstock.workers.layers.online_method import METHOD_NAMES
from penstock.workers.layers.packing import (
    Packer,
    check_deterministic,
    check_quantization,
    not_deterministic,
    weight_form,
)
from penstock.workers.layers.parameter import Parameter, Piece
from penstock.workers.models.config import BadCheckpoint, UnsupportedModel, is_file_name, read_json
from penstock.workers.models.decoder import Decoder, empty_decoder
from penstock.workers.models.protocols import Model, ModelInfo
from penstock.workers.models.spec import (
    ModelSpec,
    is_native,
    read_config,
    read_dtype,
    read_eos_tokens,
    read_spec,
)
from penstock.workers.models.transformers_backend.loading import load_transformers_model
from penstock.workers.parallel.parallel_groups import SINGLE_RANK, ParallelGroups
from penstock.workers.weights.gguf.loading_log import log_loading
from penstock.workers.weights.gguf.packed_blocks import (
    NO_BLOCKS,
    find_packed_blocks,
    keeps_blocks,
    split_packed,
)
from penstock.workers.weights.gguf.tensors import find_gguf_tensors
from penstock.workers.weights.online_quantization import (
    assign_online_methods,
    log_online_weight_only,
)
from penstock.workers.weights.quantized_method import (
    UNUSED_SUFFIXES,
    assign_methods,
    log_weight_only,
    method_names,
    quantized_modules,
    uses_w8a8_products,
)
from penstock.workers.weights.quantized_module import QuantizedModule
from penstock.workers.weights.regions import Region
from penstock.workers.weights.safetensors import read_header
from penstock.workers.weights.sharding import (
    check_native,
    check_shape,
    region_shape,
    regions,
)
from penstock.workers.weights.tensor_entry import TensorEntry
from penstock.workers.weights.tied_embeddings import has_untied_head
from penstock.workers.weights.zero_biases import is_zero_bias

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_NOT_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
"""Names of precomputed tables in older Llama and GPT-J checkpoints; the tables are not loaded."""


def load(
    folder: Path,
    dtype: str,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
    max_model_len: int | None = None,
    quantization: str = "none",
    deterministic: bool = False,
    ranks: ParallelGroups = SINGLE_RANK,
) -> tuple[ModelInfo, Model]:
    """Load a model with `load_model`, or with `transformers` if no native decoder supports it."""
    config = read_config(folder)
    if is_native(config):
        return load_model(
            folder, dtype, device, progress, max_model_len, quantization, deterministic, ranks
        )
    check_native(config, ranks.coord.mesh)
    is_quantized = bool(config.values.get("quantization_config"))
    _check_transformers_options(folder, quantization, deterministic, is_quantized)
    chosen = choose_dtype(dtype, read_dtype(config), device)
    num_bytes = sum(entry.num_bytes for entry in find_tensors(folder).values())
    eos_tokens = read_eos_tokens(folder, config)
    return load_transformers_model(
        config, eos_tokens, chosen, device, max_model_len, num_bytes, progress
    )


def _check_transformers_options(
    folder: Path, quantization: str, deterministic: bool, is_quantized: bool
) -> None:
    options = {
        f"quantization {quantization}": weight_form(quantization) is not None,
        "deterministic": deterministic,
        "a quantized checkpoint": is_quantized,
    }
    for what in (what for what, is_set in options.items() if is_set):
        raise UnsupportedModel(
            f"{folder}: {what} is not supported, because this architecture runs through "
            "transformers; only native architectures support it"
        )


def load_model(
    folder: Path,
    dtype: str,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
    max_model_len: int | None = None,
    quantization: str = "none",
    deterministic: bool = False,
    ranks: ParallelGroups = SINGLE_RANK,
) -> tuple[ModelSpec, Decoder]:
    """Load the shard of one rank from a checkpoint folder or a GGUF file.

    All checks are made before memory is allocated.

    Args:
        dtype: "auto", "float32", "bfloat16" or "float16"; see `choose_dtype`.
        progress: Called with (bytes read, total bytes), first with 0 bytes read.
        max_model_len: Maximum number of positions of a sequence; only longrope uses this limit.
        quantization: "none", "float" (dequantize GGUF files), or the form to which each layer is
            quantized as soon as the layer is loaded: "int8", "fp8" or "int4".
        deterministic: Use batch-invariant layers, whose results do not depend on the rest of the
            batch.

    Returns:
        The spec of the whole model, and the decoder of this rank.

    Raises:
        BadCheckpoint: The checkpoint is incomplete or invalid.
        UnsupportedModel: The model is not supported.
        ValueError: The device, dtype or checkpoint does not support an option.
        BadShape: The ranks cannot divide the model.
    """
    spec = read_spec(folder)
    if max_model_len is not None:
        spec = replace(spec, rope=spec.rope.within(max_model_len))
    entries = _named_in_full(find_tensors(folder), spec.names.prefix)
    if has_untied_head(spec, entries):
        spec = replace(spec, tie_embeddings=False)
        if ranks.coord.rank == 0:
            log.warning(
                "%s: config.json ties the LM head to the embeddings, but the checkpoint has a "
                "different %s.weight, which is used. To avoid this warning, set "
                "tie_word_embeddings to false", folder, spec.names.head,
            )  # fmt: skip
    chosen = choose_dtype(dtype, spec.dtype, device)
    check_shape(spec, ranks.coord.mesh)
    whole = empty_decoder(spec, chosen, torch.device("meta"))
    modules = quantized_modules(spec.quantization, whole, entries)
    packed = NO_BLOCKS
    if keeps_blocks(folder, quantization, deterministic, device, chosen):
        packed = find_packed_blocks(spec, whole, entries, ranks.coord.mesh)
        modules, entries = dict(packed.modules), split_packed(entries, packed)
    assign_methods(whole, modules, {})
    _match(folder, spec, whole.parameters(), entries, modules)
    check_quantization(quantization, device, chosen, deterministic)
    _check_quantized(folder, modules, quantization, deterministic, device, chosen)
    if is_gguf(folder) and ranks.coord.rank == 0:
        log_loading(open_gguf(folder), chosen, quantization, packed)
    if deterministic:
        check_deterministic(device, chosen)
    form = weight_form(quantization)
    # Packed GGUF blocks have the same weights as dequantized blocks; only their products round
    # differently. The KV layout string therefore names packed blocks in deterministic mode only.
    named = modules if deterministic or not is_gguf(folder) else {}
    decoder = replace(
        empty_decoder(spec, chosen, device, deterministic, ranks, quantized=form is not None),
        linear_methods=method_names(named) if form is None else METHOD_NAMES[form],
    )
    tensor_regions = regions(spec, ranks.coord)
    assign_methods(decoder, modules, tensor_regions)
    if form is not None:
        assign_online_methods(decoder, whole, form, tensor_regions)
        log_online_weight_only(form, device)
    log_weight_only(modules, device, chosen)
    packer = Packer(decoder, deterministic)
    _stream(entries, decoder.parameters(), tensor_regions, progress, packer.finish)
    return spec, decoder


def _check_quantized(
    folder: Path,
    modules: Mapping[str, QuantizedModule],
    quantization: str,
    deterministic: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise if an option cannot be used with the quantized modules of a checkpoint."""
    if not modules:
        return
    if quantization != "none":
        raise ValueError(
            f"quantization {quantization} is not available: {folder} is quantized already "
            f"({method_names(modules)}): set quantization to 'none'"
        )
    if not deterministic or supports_dequantizing(device, dtype):
        return
    if not all(uses_w8a8_products(module.scheme, device) for module in modules.values()):
        raise not_deterministic("quantized checkpoints", device, dtype)


def choose_dtype(name: str, own: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights.

    On a CPU, "auto" means float32, because linear layers of 16-bit dtypes are several times slower
    there. On a GPU, "auto" means `own`, the dtype of the checkpoint.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else own
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {name!r}: expected auto, float32, bfloat16 or float16")
    chosen: torch.dtype = getattr(torch, name)
    return chosen


def find_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Return all tensors of a checkpoint by name.

    The checkpoint is a GGUF file, one safetensors file, or several safetensors files with an index.
    An index next to a single file is ignored, as in `transformers`: it belongs to older files.
    """
    if is_gguf(folder):
        return find_gguf_tensors(folder)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pth", "*.pt")):
        raise UnsupportedModel(
            f"{folder} has pickled weights only, which are never loaded (they can run code): "
            "convert the weights to safetensors"
        )
    raise BadCheckpoint(f"{folder} has neither {SINGLE} nor {INDEX}: copy or download it again")


def _sharded(folder: Path) -> dict[str, TensorEntry]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        is_file_name(file) for file in weight_map.values()
    ):
        raise BadCheckpoint(f"{folder / INDEX} has no valid weight_map: download it again")
    files = {file: read_header(folder / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise BadCheckpoint(
                f"{folder / file} lacks tensor {name}, which {INDEX} lists: download both "
                "files again"
            )
    return {name: files[file][name] for name, file in weight_map.items()}


def _named_in_full(entries: dict[str, TensorEntry], prefix: str) -> dict[str, TensorEntry]:
    """Add `prefix` to all names if no name has the prefix (checkpoints saved without the head)."""
    if any(name.startswith(prefix) for name in entries):
        return entries
    return {prefix + name: replace(entry, name=prefix + name) for name, entry in entries.items()}


def _match(
    folder: Path,
    spec: ModelSpec,
    parameters: dict[str, Parameter],
    entries: dict[str, TensorEntry],
    modules: Mapping[str, QuantizedModule],
) -> None:
    """Check that the checkpoint has exactly the tensors that the whole model needs."""
    tied = {f"{spec.names.head}.weight"} if spec.tie_embeddings else set()
    known = parameters.keys() | tied
    extra = {
        name
        for name, entry in entries.items()
        if name not in known
        and not _is_unused(spec, name, modules)
        and not is_zero_bias(name, entry, modules)
    }
    problems = (("lacks", parameters.keys() - entries.keys()), ("has the unexpected", extra))
    for verb, names in problems:
        if names:
            raise BadCheckpoint(
                f"{folder} {verb} {_listed(names)} (config.json says {spec.family}, "
                f"{spec.num_layers} layers): the files do not belong together or are incomplete"
            )
    for name, each in parameters.items():
        _check(entries[name], each)


def _is_unused(spec: ModelSpec, name: str, modules: Mapping[str, QuantizedModule]) -> bool:
    """Return True if a checkpoint may contain this tensor, although it is not loaded."""
    further = range(spec.num_layers, spec.num_layers + spec.num_mtp_layers)
    prefixes = tuple(f"{spec.names.layers}.{number}." for number in further)
    if modules and name.rpartition(".")[2] in UNUSED_SUFFIXES:
        return True
    return bool(_NOT_WEIGHTS.search(name)) or name.startswith(prefixes)


def _listed(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"tensor {first}" + (f" and {len(others)} more" if others else "")


def _check(entry: TensorEntry, expected: Parameter) -> None:
    served = entry.loadable_dtypes(expected.accepts)
    if entry.dtype not in served:
        raise UnsupportedModel(
            f"{entry.path}: tensor {entry.stored_name} has dtype {entry.dtype}: expected "
            + " or ".join(served)
        )
    if entry.shape not in (expected.shape, *expected.alternatives):
        raise BadCheckpoint(
            f"{entry.path}: tensor {entry.stored_name} has shape {list(entry.shape)}, but the "
            f"configuration requires {list(expected.shape)}: weights and configuration do not "
            "belong together"
        )


def _stream(
    entries: dict[str, TensorEntry],
    parameters: dict[str, Parameter],
    tensor_regions: dict[str, Region],
    progress: Callable[[int, int], None],
    finish: Callable[[object], None],
) -> None:
    """Load all parameters, one module after the other; call `finish` for each loaded module.

    `finish` may pack weights. This order bounds the memory: only one module at a time has unpacked
    weights.
    """
    total = sum(entries[name].bytes_of(each.num_items) for name, each in parameters.items())
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    progress(0, total)
    with ExitStack() as stack:
        files: dict[Path, BufferedReader] = {}
        for owner, names in _by_owner(entries, parameters):
            for name in names:
                entry, parameter = entries[name], parameters[name]
                if entry.path not in files:
                    files[entry.path] = stack.enter_context(entry.path.open("rb"))
                for piece in parameter.pieces or (_whole(parameter, tensor_regions.get(name)),):
                    target = piece.data()
                    assert math.prod(region_shape(entry.shape, piece.region)) == target.numel()
                    entry.load(target, files[entry.path], advance, piece.region)
                    piece.finish()
            finish(owner)


def _whole(parameter: Parameter, region: Region | None) -> Piece:
    """Return a parameter as one piece, with the parameter's own region if set, else `region`."""
    own = parameter.region if parameter.region is not None else region or ()
    return Piece(own, parameter.data, lambda: None)


def _by_owner(
    entries: dict[str, TensorEntry], parameters: dict[str, Parameter]
) -> Iterable[tuple[object, list[str]]]:
    """Return each module with the names of its tensors, in the order of the files."""
    groups: dict[int, tuple[object, list[str]]] = {}
    for name in sorted(parameters, key=lambda name: (entries[name].path, entries[name].start)):
        owner = parameters[name].owner
        groups.setdefault(id(owner), (owner, []))[1].append(name)
    return groups.values()
