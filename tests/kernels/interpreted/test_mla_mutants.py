"""Mutation tests: comparisons with the reference detect off-by-one errors in MLA.

Mutants of the absorbed form change the attention kernels, which read an MLA cache row as a key with
a tail. Mutants of the expanded form change the torch code that expands keys and values.
"""

from pathlib import Path

import pytest

from penstock.kernels.mla import op as mla
from penstock.kernels.mla import torch_gather
from tests.support.latent import check, check_one_path
from tests.support.mutants import (
    IN_PARTS,
    KERNEL,
    NOTHING,
    Change,
    expect_failure,
    mutant_of,
    replaced,
    under_kernel,
)

pytestmark = [pytest.mark.interpreted, pytest.mark.long]

ABSORBED: dict[str, Change] = {
    **{name: change for name, change in KERNEL.items() if name not in ("window", "first seen")},
    **IN_PARTS,
    "tail of the query": ("query + D + q_at", "query + D - 1 + q_at"),
    "tail of the key": ("layer + D + kv_at", "layer + D - 1 + kv_at"),
    "width of the tail": ("behind < TAIL if", "behind < TAIL - 1 if"),
    "width of the value": ("features < D if", "features < D - 1 if"),
    "offset of a head": ("heads * (D + TAIL)", "heads * D + TAIL"),
    "number of partitions": (
        "(high + SPLIT - 1) // SPLIT - first_partition",
        "high // SPLIT - first_partition",
    ),
    "end of partition": (
        "tl.minimum(high, (first_partition + partition + 1) * SPLIT)",
        "tl.minimum(high, (first_partition + partition + 1) * SPLIT + 1)",
    ),
}

EXPANDED: dict[str, Change] = {
    "causal mask": ("seen = positions <= positions[", "seen = positions < positions["),
    "first row of the mask": (
        "[context - query_len :, None]",
        "[context - query_len - 1 : -1, None]",
    ),
    "causal without context": ("query_len in (1, context)", "query_len in (1, 7, context)"),
    "block": ("table[: -(-context", "table[1 : 1 - (-context"),
    "shared key": (
        "query_dim : query.shape[2]] = shared_key",
        "query_dim - 1 : query.shape[2] - 1] = shared_key",
    ),
    "heads at once": ("min(start + size, num_heads)", "min(start + size, num_heads - 1)"),
}

QUERY: dict[str, Change] = {
    "rotated part of a query": ("= query[:, :, query_dim:]", "= query[:, :, query_dim - 1 : -1]"),
}


def compare_absorbed() -> None:
    check([(1, 33), (12, 50), (2, 65)])
    check_one_path([(17, 50), (1, 33)], [(4, 1)])


def test_unchanged_source_passes(tmp_path: Path) -> None:
    under_kernel(compare_absorbed, NOTHING, tmp_path)
    check_expanded(("Span", "Span"), tmp_path)
    check_query(("Plan", "Plan"), tmp_path)


@pytest.mark.parametrize("name", ABSORBED)
def test_a_mutant_kernel_is_detected(name: str, tmp_path: Path) -> None:
    with expect_failure():
        under_kernel(compare_absorbed, ABSORBED[name], tmp_path)


LENGTHS = [(1, 33), (7, 20), (5, 5)]


def check_expanded(change: Change, folder: Path) -> None:
    mutant = mutant_of(torch_gather, change, folder)
    with replaced(mla, mutant, "Span", "attend_expanded_"):
        check(LENGTHS, absorbs=False)


@pytest.mark.parametrize("name", EXPANDED)
def test_a_mutant_expansion_is_detected(name: str, tmp_path: Path) -> None:
    with expect_failure():
        check_expanded(EXPANDED[name], tmp_path)


def check_query(change: Change, folder: Path) -> None:
    check(LENGTHS, absorbs=False, file=mutant_of(mla, change, folder))


@pytest.mark.parametrize("name", QUERY)
def test_a_mutant_query_is_detected(name: str, tmp_path: Path) -> None:
    with expect_failure():
        check_query(QUERY[name], tmp_path)
