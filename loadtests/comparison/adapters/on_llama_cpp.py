"""Adapter for llama.cpp through its C API: one batch of sequences, greedy decoding."""

import ctypes
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
    int8 = options["quantization"] == "int8"
    file = _converted(Path(options["model"]), int8)
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
    if not model:
        raise RuntimeError(f"llama.cpp could not load {file}")
    contexts: dict[tuple[int, int], Any] = {}

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        # One context per batch shape, because a context reserves a KV cache for each sequence.
        length = -(-(len(prompts[0]) + output_len) // 256) * 256
        shape = (len(prompts), length)
        if shape not in contexts:
            contexts[shape] = _context(model, *shape, options["threads"], int8)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(contexts[shape]), False)
        vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        return _greedy(contexts[shape], vocab_size, prompts, output_len)

    yield (
        generate,
        {
            "version": importlib.metadata.version("llama-cpp-python"),
            "weights": "Q8_0" if int8 else "fp32",
            "kv": "fp16 (its default)" if int8 else "fp32",
            "batching": "static, through llama_decode",
        },
    )


def _converted(model: Path, int8: bool) -> Path:
    """Return the GGUF file of the checkpoint, which is converted on first use."""
    file = model / ("q8_0.gguf" if int8 else "f32.gguf")
    if not file.exists():
        temporary = file.with_suffix(f".{os.getpid()}")
        try:
            gguf_file.write(model, temporary, int8)
            temporary.rename(file)
        finally:
            temporary.unlink(missing_ok=True)
    return file


def _context(model: Any, num_sequences: int, length: int, threads: int, int8: bool) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = num_sequences * length
    parameters.n_seq_max = num_sequences
    parameters.n_batch = parameters.n_ubatch = _CHUNK
    parameters.n_threads = parameters.n_threads_batch = threads
    if not int8:  # the default KV cache of llama.cpp is fp16
        parameters.type_k = parameters.type_v = _F32
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise RuntimeError("llama.cpp could not create the context: out of memory?")
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
            raise RuntimeError(f"llama_decode returned {code}")
        for index, (_, _, sequence, wanted) in enumerate(entries):
            if wanted:
                row = llama_cpp.llama_get_logits_ith(context, index)
                address = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
                last[sequence] = int(np.ctypeslib.as_array(address, (vocab_size,)).argmax())
    finally:
        llama_cpp.llama_batch_free(batch)
