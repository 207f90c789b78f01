"""`yarn_positions`: the context length of models whose context YaRN extends."""

from typing import Any

import pytest

from penstock.common.rope_scaling import yarn_positions

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_scaling": YARN}, 131072),
        ({"rope_parameters": YARN | {"rope_type": "yarn"}}, 131072),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {}}}, 131072),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_scaling": YARN | {"factor": 2.5}}, 81920),
        ({}, 0),
        ({"rope_scaling": None}, 0),
        ({"rope_scaling": "yarn"}, 0),
        ({"rope_scaling": YARN | {"type": "linear"}}, 0),
        ({"rope_scaling": YARN | {"long_factor": [1.0]}}, 0),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 0),
        ({"rope_scaling": YARN | {"factor": float("inf")}}, 0),
        ({"rope_scaling": YARN | {"factor": float("nan")}}, 0),
        ({"rope_scaling": YARN | {"factor": 10**400}}, 0),
        ({"rope_scaling": YARN | {"factor": -4}}, 0),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 10**400}}, 0),
        ({"rope_scaling": YARN | {"factor": "4"}}, 0),
    ],
)
def test_yarn_extends_the_context(config: dict[str, Any], expected: int) -> None:
    assert yarn_positions(config) == expected
