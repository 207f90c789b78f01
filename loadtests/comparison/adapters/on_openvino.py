"""Adapter for OpenVINO GenAI with continuous batching."""

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai


@contextmanager
def engine(options: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Load the model and yield `generate` and the description for the report."""
    int8 = options["form"] == "int8"
    exported = _exported(Path(options["model"]), "int8" if int8 else "fp32")
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options["kv_gib"]
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = options["num_requests"]
    scheduler.enable_prefix_caching = False
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options["threads"]}
    if not int8:  # the default KV cache of OpenVINO is 8-bit
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(exported), scheduler, "CPU", properties
    )

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            ignore_eos=True,
            do_sample=False,
        )
        inputs = [openvino.Tensor(np.asarray([prompt], np.int64)) for prompt in prompts]
        answers = pipeline.generate(inputs, [config] * len(inputs))
        return [list(answer.m_generation_ids[0]) for answer in answers]

    yield (
        generate,
        {
            "version": importlib.metadata.version("openvino-genai"),
            "weights": "int8" if int8 else "fp32",
            "kv": "u8 (its default)" if int8 else "float32",
            "prefix_cache": False,
        },
    )


def _exported(model: Path, dtype: str) -> Path:
    """Return the path of the checkpoint in OpenVINO's format. It is exported on first use."""
    folder = model / f"openvino-{importlib.metadata.version('optimum-intel')}-{dtype}"
    if not folder.exists():
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig, OVWeightQuantizationConfig

        temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
        quantization = OVWeightQuantizationConfig(bits=8) if dtype == "int8" else None
        try:
            main_export(
                str(model),
                temporary,
                task="text-generation-with-past",
                ov_config=OVConfig(dtype=dtype, quantization_config=quantization),
                convert_tokenizer=True,
            )
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder
