"""Attention backends of other libraries, tested with stand-ins that compute with torch.

The libraries themselves have not run: see docs/gpu.md.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.attention.backends import choice, flash_attention, flashinfer
from penstock.kernels.attention.backends.choice import choose_attention_backend, try_backend
from penstock.kernels.attention.backends.flashinfer import page_lists
from penstock.kernels.attention.backends.interface import (
    AttentionBackend,
    AttentionRequest,
    HostBatch,
)
from penstock.kernels.attention.backends.native import NativeBackend
from penstock.kernels.attention.op import paged_attention, paged_attention_reference
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.attention.triton_launch import Batch
from tests.support.attention_modules import MULTIPROCESSORS, fake_modules

CPU = torch.device("cpu")

REQUEST = AttentionRequest(
    device="cuda",
    capability=(9, 0),
    multiprocessors=MULTIPROCESSORS,
    dtype="bfloat16",
    cached="bfloat16",
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    captured_rows=8,
    windows=(0, 0),
    scale=None,
)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    found = fake_modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_ordinary_models_are_supported() -> None:
    for request in (REQUEST, replace(REQUEST, cap=30.0, scale=0.1, windows=(0, 128))):
        assert flash_attention.supports(request) == ""
        assert flashinfer.supports(request) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu"}, "it needs a CUDA device"),
        ({"deterministic": True}, "deterministic mode"),
        ({"is_native": False}, "through transformers"),
        ({"is_latent": True}, "latent attention"),
        ({"dtype": "float32", "cached": "float32"}, "bfloat16 or float16, not float32"),
        ({"cached": "float8_e4m3fn"}, "the dtype bfloat16, not float8_e4m3fn"),
        ({"has_sinks": True}, "attention sinks"),
        ({"has_alibi": True}, "ALiBi"),
        ({"capability": (7, 5)}, "not sm_75"),
        ({"head_dim": 300}, "not 300"),
    ],
)
@pytest.mark.parametrize("supports", [flash_attention.supports, flashinfer.supports])
def test_refusal_names_the_reason(
    supports: Callable[[AttentionRequest], str], change: dict[str, Any], reason: str
) -> None:
    assert reason in supports(replace(REQUEST, **change))


def test_backends_differ_in_chips_and_head_sizes() -> None:
    ampere, narrow = replace(REQUEST, capability=(8, 0)), replace(REQUEST, head_dim=96)
    assert flashinfer.supports(ampere) == ""
    assert "sm_90" in flash_attention.supports(ampere)
    assert "96" in flashinfer.supports(narrow)
    assert flash_attention.supports(narrow) == ""


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1, 4, 16]))
def test_page_lists_name_the_block_of_every_position(contexts: list[int], size: int) -> None:
    columns = -(-max(contexts) // size) + 1
    tables = np.arange(len(contexts) * columns, dtype=np.int32).reshape(-1, columns)
    lists = page_lists(np.array(contexts, np.int32), tables, size)
    assert all(each.dtype == torch.int32 for each in (lists.starts, lists.pages))
    for row, context in enumerate(contexts):
        pages = lists.pages[int(lists.starts[row]) : int(lists.starts[row + 1])].tolist()
        positions = (len(pages) - 1) * size + int(lists.last_page_lens[row])
        assert positions == context
        assert pages == tables[row, : -(-context // size)].tolist()


def make_backend(name: str, request: AttentionRequest) -> AttentionBackend:
    return choice.EXTERNAL[name].create(request, CPU)


@pytest.mark.parametrize("name", choice.EXTERNAL)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"windows": (0, 20), "cap": 5.0, "scale": 0.2},
        {"num_heads": 4, "num_kv_heads": 4, "head_dim": 128, "dtype": "float16"},
    ],
)
def test_steps_agree_with_the_reference(
    name: str, change: dict[str, Any], modules: dict[str, ModuleType]
) -> None:
    """Run chunks, decode steps and graph steps one after another, with strided queries."""
    request = replace(REQUEST, **change)
    backend = make_backend(name, request)
    try_backend(backend, request, CPU)
    backend = make_backend(name, request)
    generator = np.random.default_rng(1)
    dtype = getattr(torch, request.dtype)
    shape = (2, 60, request.num_kv_heads, request.block_size, request.head_dim)
    layer = torch.randn(shape).to(dtype)
    scores = ScoreMod(request.scale, request.cap)
    lengths = [([4], True), ([7, 1, 30], False), ([1, 1, 1], True), ([1, 1, 1], True), ([1], False)]
    for counts, is_captured in lengths:
        if is_captured:
            counts = [1] * 3
        contexts = np.array(counts) + generator.integers(0, 60, len(counts))
        blocks = generator.permutation(60)[: len(counts) * 6].reshape(-1, 6)
        host = HostBatch(
            np.cumsum([0, *counts]).astype(np.int32),
            contexts.astype(np.int32),
            blocks.astype(np.int32),
            is_captured,
        )
        num_tokens, num_heads = sum(counts), request.num_heads
        heads = torch.randn(num_tokens, num_heads + 3, request.head_dim).to(dtype)
        query = heads[:, :num_heads]
        arrays: list[Any] = [host.query_starts, host.context_lens, host.block_tables]
        there = Batch(*(torch.from_numpy(each) for each in arrays))
        backend.prepare(host)
        for window in set(request.windows):
            plan = backend.plan(there, layer, max(counts), int(contexts.max()), window)
            found = paged_attention(query, layer, plan, scores)
            expected = paged_attention_reference(
                query.float(),
                layer.float(),
                host.query_starts,
                host.context_lens,
                host.block_tables,
                window,
                scores,
            )
            torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "mib"),
    [
        (32, 8, 128, 128),
        (64, 8, 128, 197),
        (64, 4, 128, 303),
        (96, 4, 64, 539),
        (16, 8, 256, 128),
        (64, 64, 128, 128),
    ],
)
@pytest.mark.parametrize("captured_rows", [1, 256])
def test_workspace_of_flashinfer_suffices_for_the_largest_steps(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    mib: int,
    captured_rows: int,
    modules: dict[str, ModuleType],
) -> None:
    request = replace(
        REQUEST,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        captured_rows=captured_rows,
    )
    found = flashinfer.workspace_bytes(request)
    assert found >= 128 << 20
    if captured_rows == 256:
        assert -(-found >> 20) == mib
    backend = make_backend("flashinfer", request)
    steps = [([1] * captured_rows, True), ([200], False), ([1] * 3, False), ([20] * 7, False)]
    for counts, is_captured in steps:
        num_sequences = len(counts)
        host = HostBatch(
            np.cumsum([0, *counts]).astype(np.int32),
            np.full(num_sequences, 4096, np.int32),
            np.zeros((num_sequences, 256), np.int32),
            is_captured,
        )
        backend.prepare(host)


def choose(name: str, request: AttentionRequest, caplog: pytest.LogCaptureFixture) -> str:
    """Return the name of the chosen backend, and check that the log names this backend."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "penstock.kernels.attention.backends.choice"):
        found = choose_attention_backend(name, request, CPU)
    assert found.name in caplog.messages[-1]
    return found.name


@pytest.mark.parametrize("name", choice.EXTERNAL)
def test_installed_backend_is_used(
    name: str, modules: dict[str, ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(name, REQUEST, caplog) == name
    assert caplog.messages == [f"attention backend: {name}"]


def test_default_is_ours(modules: dict[str, ModuleType], caplog: pytest.LogCaptureFixture) -> None:
    assert choose("auto", REQUEST, caplog) == "triton"
    assert choose("auto", replace(REQUEST, device="cpu"), caplog) == "cpu"
    found = choose_attention_backend("auto", replace(REQUEST, deterministic=True), CPU)
    assert isinstance(found, NativeBackend)
    assert found.name == "triton"
    assert found.batch_invariant


@pytest.mark.parametrize("name", choice.EXTERNAL)
def test_missing_module_and_unsupported_model_fall_back_to_ours(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(name, REQUEST, caplog) == "triton"
    assert f"attention backend {name} is not used: the module" in caplog.text
    assert choose(name, replace(REQUEST, has_sinks=True), caplog) == "triton"
    assert f"attention backend {name} is not used: it does not support attention sinks" in (
        caplog.text
    )


def test_failing_first_call_falls_back_to_ours(
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(modules["flash_attn_interface"], "flash_attn_with_kvcache", fails)
    assert choose("fa3", REQUEST, caplog) == "triton"
    assert caplog.messages == [
        "attention backend fa3 is not used: its first call failed: RuntimeError: no kernel image "
        "is available; using triton"
    ]


def test_wrong_first_result_falls_back_to_ours(
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A library that defines the window differently is refused."""
    wrapper = modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper
    plan = wrapper.plan

    def window_too_wide(self: Any, *args: Any, window_left: int, **options: Any) -> None:
        plan(self, *args, window_left=window_left + 9, **options)

    monkeypatch.setattr(wrapper, "plan", window_too_wide)
    assert choose("flashinfer", replace(REQUEST, windows=(5,)), caplog) == "triton"
    assert "with a window of 5 positions (0: no window), its largest error is" in caplog.text
