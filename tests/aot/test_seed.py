"""Triton finds kernels compiled ahead of time, under the keys that a worker's launches have."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import FileCacheManager

from penstock.kernels.triton_common import kernel_cache
from penstock.kernels.triton_common.kernel_cache import SeededCacheManager, use_seed
from penstock.kernels.triton_common.launch import INTERPRETED
from tests.aot.case import SM_80, SM_90
from tests.aot.compiling import cache_key
from tests.aot.seed import MODELS, compile_model, main, record

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")

STEPS = ([17], [1, 1, 40], [5], [300], [2, 33, 1], [1, 1, 64], [2] * 8)
"""Prefill steps other than those of the warm-up."""


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that selects a seed folder by name, and returns the empty Triton cache."""

    def use(name: str) -> Path:
        monkeypatch.setattr(kernel_cache, "SEED", tmp_path / name)
        monkeypatch.delenv(kernel_cache.MANAGER_VARIABLE, raising=False)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
        use_seed()
        return tmp_path / "own"

    return use


def test_files_are_found_in_a_seed_that_was_moved(
    tmp_path: Path, caches: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "build"))
    writer = FileCacheManager("key")
    group = {name: writer.put(b"code", name) for name in ("k.json", "k.cubin")}
    writer.put_group("k.json", group)
    shutil.move(tmp_path / "build", tmp_path / "seed")
    own = caches("seed")
    reader = SeededCacheManager("key")
    assert reader.get_file("k.cubin") == str(tmp_path / "seed" / "key" / "k.cubin")
    assert reader.get_file("absent") is None
    assert reader.get_group("k.json") == {
        name: str(tmp_path / "seed" / "key" / name) for name in group
    }
    assert SeededCacheManager("other").get_group("k.json") is None
    path = reader.put(b"newer", "k.cubin")
    assert (reader.get_file("k.cubin"), path) == (path, str(own / "key" / "k.cubin"))
    (tmp_path / "seed" / "key" / "__grp__k.json").write_text("{")
    assert SeededCacheManager("key").get_group("k.json") is None


def test_seed_is_used_only_if_it_exists_and_no_other_manager_is_chosen(
    tmp_path: Path, caches: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    caches("absent")
    assert kernel_cache.MANAGER_VARIABLE not in os.environ
    (tmp_path / "seed").mkdir()
    caches("seed")
    assert triton.knobs.cache.manager_class is SeededCacheManager
    monkeypatch.setenv(kernel_cache.MANAGER_VARIABLE, "triton.runtime.cache:FileCacheManager")
    use_seed()
    assert triton.knobs.cache.manager_class is FileCacheManager


class FakeDriver:
    """A driver for a GPU that does not exist: launches are compiled but not run."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def test_seed_has_the_kernel_of_token_masks() -> None:
    names = {launch.kernel.fn.__name__ for launch in record("demo", SM_90)}
    assert "_token_mask_kernel" in names


@pytest.mark.slow
def test_launches_of_the_bundled_model_are_found_by_triton_itself(
    tmp_path: Path, caches: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_model("demo", SM_90, tmp_path / "seed")
    assert len(list((tmp_path / "seed").iterdir())) == len(compiled) > 10
    own = caches("seed")
    fake = FakeDriver(GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    found: list[tuple[str, bool]] = []

    def listener(src: Any, metadata: Any, cache_hit: bool, **_: Any) -> None:
        found.append((metadata["hash"], cache_hit))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    launches = [*record("demo", SM_90), *record("demo", SM_90, STEPS)]
    for launch in launches:
        launch.kernel.device_caches.clear()
        launch.kernel.run(*launch.arguments, grid=(1,), warmup=True, **launch.options)
        launch.kernel.device_caches.clear()
    assert len(found) == len(launches) > 20
    assert [key for key, cache_hit in found if not cache_hit] == []
    assert {key for key, _ in found} == compiled
    assert not [path for path in own.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"demo"}))
def test_steps_of_larger_models_have_the_keys_of_the_seed(name: str) -> None:
    for chip in (SM_80, SM_90):
        seed = {cache_key(launch, chip) for launch in record(name, chip)}
        steps = {cache_key(launch, chip) for launch in record(name, chip, STEPS)}
        assert len(steps) > 5
        assert steps <= seed


def test_unknown_models_and_chips_are_refused(tmp_path: Path) -> None:
    for words in (["--models", "none"], ["--chips", "sm_1"]):
        with pytest.raises(SystemExit):
            main([str(tmp_path), *words])
