"""WorkerConfig: an invalid value is refused by a one-line error that names its field."""

from pathlib import Path
from typing import Any

import pytest

from penstock.workers.config import LARGE_GPU_BYTES, StepSizes, WorkerConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("role", "both"),
        ("dtype", "int8"),
        ("kv_cache_dtype", "float16"),
        ("attention_backend", "FLASHINFER"),
        ("device", "tpu"),
        ("host", "0.0.0.0"),
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("block_size", 0),
        ("max_sequences", 0),
        ("max_batched_tokens", -5),
        ("max_queued", 0),
        ("kv_cache_mib", 0),
        ("max_model_len", 0),
        ("threads", 0),
        ("heartbeat_seconds", 0.0),
        ("transfer_seconds", -1.0),
        ("hash_key", b"short"),
    ],
)
def test_invalid_values_are_refused_with_the_field_name(field: str, value: Any) -> None:
    given: dict[str, Any] = {"name": "w", "model": Path("m"), field: value}
    with pytest.raises(
        ValueError, match=field if field != "name" else "name of the worker is empty"
    ) as caught:
        WorkerConfig(**given)
    assert "\n" not in str(caught.value)


def test_token_is_not_shown_in_the_repr() -> None:
    assert "hush" not in repr(WorkerConfig("w", Path("m"), token="hush"))


@pytest.mark.parametrize(
    ("memory_bytes", "expected"),
    [
        (None, StepSizes(16, 64, 512)),
        (LARGE_GPU_BYTES, StepSizes(64, 256, 8192)),
        (LARGE_GPU_BYTES - 1, StepSizes(64, 256, 2048)),
    ],
)
def test_default_sizes_depend_on_the_device(memory_bytes: int | None, expected: StepSizes) -> None:
    assert WorkerConfig("w", Path("m")).step_sizes(memory_bytes) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"threads": 2, "max_threads": 2}, 512),
        ({"threads": 1, "max_threads": 2}, 256),
        ({"threads": 1, "max_threads": 3}, 170),
        ({"threads": 1, "max_threads": 64}, 128),
        ({"threads": 1, "max_threads": 2, "tp": 2}, 512),
        ({"threads": 1, "max_threads": 2, "max_sequences": 300}, 300),
        ({"threads": 1}, 512),
    ],
)
def test_default_tokens_of_a_step_follow_the_fraction_of_the_cores(
    given: dict[str, int], expected: int
) -> None:
    config = WorkerConfig("w", Path("m"), **given)  # type: ignore[arg-type]
    assert config.step_sizes(None).max_batched_tokens == expected
    assert config.step_sizes(LARGE_GPU_BYTES).max_batched_tokens == 8192


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"block_size": 32}, StepSizes(32, 64, 512)),
        ({"max_sequences": 9, "max_batched_tokens": 10}, StepSizes(16, 9, 10)),
        ({"max_batched_tokens": 10}, StepSizes(16, 10, 10)),
        ({"max_sequences": 1000}, StepSizes(16, 1000, 1000)),
    ],
)
def test_sizes_that_are_set_are_kept_and_defaults_fit_them(
    given: dict[str, int], expected: StepSizes
) -> None:
    assert WorkerConfig("w", Path("m"), **given).step_sizes(None) == expected  # type: ignore[arg-type]
