"""Adapter for llama.cpp through its C API: one batch of sequences, greedy decoding."""

import ctypes
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf_file
import llama_cpp
import numpy as np

_CHUNK = 512  # maximum tokens per llama_decode call
_F32 = 0  # value of GGML_TYPE_F32 in llama.cpp


@contextmanager
def engine(options: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Load the model and yield `generate` and the description for the report."""
    form = FORMS[options["form"]]
    file = form.file(Path(options["model"]))
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
    if not model:
        raise RuntimeError(
            f"llama.cpp could not load {file}: if the file is incomplete, delete it and run again"
        )
    contexts: dict[tuple[int, int], Any] = {}

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        # Each batch shape has a context of its own, because a context reserves a KV cache for a
        # fixed number of sequences.
        length = -(-(len(prompts[0]) + output_len) // 256) * 256
        shape = (len(prompts), length)
        if shape not in contexts:
            contexts[shape] = _context(model, *shape, options["threads"], form.has_f16_cache)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(contexts[shape]), False)
        vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        return _greedy(contexts[shape], vocab_size, prompts, output_len)

    yield (
        generate,
        {
            "version": importlib.metadata.version("llama-cpp-python"),
            "weights": form.title,
            "kv": "float16 (its default)" if form.has_f16_cache else "float32",
            "batching": "static, through llama_decode",
        },
    )


def _q4_k_m(model: Path) -> Path:
    """Return the path of the checkpoint as a Q4_K_M file. llama.cpp writes it on first use."""
    source = gguf_file.converted(model, "f32")

    def quantize(file: Path) -> None:
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
        code = llama_cpp.llama_model_quantize(
            str(source).encode(), str(file).encode(), ctypes.byref(parameters)
        )
        if code:
            raise RuntimeError(f"llama.cpp could not quantize {source}: error code {code}")

    return Path(gguf_file.made(model / "q4_k_m.gguf", quantize))


@dataclass(frozen=True, slots=True)
class Form:
    """A form of the weights and of the KV cache."""

    title: str
    file: Callable[[Path], Path]  # returns the path of a checkpoint as a GGUF file
    has_f16_cache: bool


FORMS = {
    "": Form("fp32", partial(gguf_file.converted, name="f32"), has_f16_cache=False),
    "file": Form("as in the file", lambda file: file, has_f16_cache=False),
    "f16": Form("F16", partial(gguf_file.converted, name="f16"), has_f16_cache=False),
    "int8": Form("Q8_0", partial(gguf_file.converted, name="q8_0"), has_f16_cache=True),
    "int4": Form("Q4_K_M", _q4_k_m, has_f16_cache=True),
}


def _context(model: Any, num_sequences: int, length: int, threads: int, f16_cache: bool) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = num_sequences * length
    parameters.n_seq_max = num_sequences
    parameters.n_batch = parameters.n_ubatch = _CHUNK
    parameters.n_threads = parameters.n_threads_batch = threads
    if not f16_cache:  # the default KV cache of llama.cpp is fp16
        parameters.type_k = parameters.type_v = _F32
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise RuntimeError(
            f"llama.cpp could not create a context of {parameters.n_ctx} tokens: see its log"
        )
    return context


def _greedy(
    context: Any, vocab_size: int, prompts: list[list[int]], output_len: int
) -> list[list[int]]:
    last = [0] * len(prompts)
    entries = [
        (token, position, sequence, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    answers: list[list[int]] = [[] for _ in prompts]
    for index in range(output_len):
        for begin in range(0, len(entries), _CHUNK):
            _decode(context, vocab_size, entries[begin : begin + _CHUNK], last)
        for sequence, token in enumerate(last):
            answers[sequence].append(token)
        entries = [
            (token, len(prompts[sequence]) + index, sequence, True)
            for sequence, token in enumerate(last)
        ]
    return answers


def _decode(
    context: Any, vocab_size: int, entries: list[tuple[int, int, int, bool]], last: list[int]
) -> None:
    """Run one llama_decode call over `entries`.

    An entry is (token, position, sequence, needs logits). For each entry that needs logits, the
    sequence's next token is stored in `last`.
    """
    batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
    try:
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wanted
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed for {len(entries)} tokens: error code {code}")
        for index, (_, _, sequence, wanted) in enumerate(entries):
            if wanted:
                row = llama_cpp.llama_get_logits_ith(context, index)
                address = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
                last[sequence] = int(np.ctypeslib.as_array(address, (vocab_size,)).argmax())
    finally:
        llama_cpp.llama_batch_free(batch)
