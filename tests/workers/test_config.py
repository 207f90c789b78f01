"""WorkerConfig: an invalid value is refused by a one-line error that names its field."""

from pathlib import Path
from typing import Any

import pytest

from penstock.workers.config import WorkerConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("role", "both"),
        ("dtype", "int8"),
        ("kv_cache_dtype", "float16"),
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
    with pytest.raises(ValueError, match=field if field != "name" else "needs a name") as caught:
        WorkerConfig(**given)
    assert "\n" not in str(caught.value)


def test_token_is_not_shown_in_the_repr() -> None:
    assert "hush" not in repr(WorkerConfig("w", Path("m"), token="hush"))
