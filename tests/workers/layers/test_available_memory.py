"""The memory that a CPU worker may use respects the limits of its cgroups."""

from pathlib import Path

import psutil
import pytest

from penstock.workers.layers import available_memory
from penstock.workers.layers.available_memory import available_bytes, cgroup_bytes_left

GIB = 1 << 30


def write_cgroup(
    folder: Path, limit: int | str, used: int, cached: int = 0, version: int = 2
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    parts = f"{names[2]}inactive_file {cached // 4}\n{names[2]}active_file {cached * 3 // 4}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{parts}")


def own(folder: Path, text: str) -> Path:
    path = folder / "own"
    path.write_text(text)
    return path


def test_cached_file_data_counts_as_free(tmp_path: Path) -> None:
    write_cgroup(tmp_path, 8 * GIB, 5 * GIB, cached=2 * GIB)
    assert cgroup_bytes_left(tmp_path, own(tmp_path, "0::/\n")) == 5 * GIB


def test_smallest_limit_of_a_cgroup_and_its_parents_counts(tmp_path: Path) -> None:
    write_cgroup(tmp_path / "a", 4 * GIB, 3 * GIB)
    write_cgroup(tmp_path / "a" / "b", "max", GIB)
    assert cgroup_bytes_left(tmp_path, own(tmp_path, "0::/a/b\n")) == GIB


def test_cgroup_outside_of_the_container_is_the_mounted_one(tmp_path: Path) -> None:
    write_cgroup(tmp_path, 2 * GIB, GIB)
    for path in ("/kubepods/pod1/container1", "/../../other"):
        assert cgroup_bytes_left(tmp_path, own(tmp_path, f"0::{path}\n")) == GIB


def test_limits_of_version_1_count(tmp_path: Path) -> None:
    write_cgroup(tmp_path / "memory" / "pod", 3 * GIB, 2 * GIB, cached=GIB // 2, version=1)
    text = "5:cpu,cpuacct:/other\n4:memory:/pod\n0::/\n"
    assert cgroup_bytes_left(tmp_path, own(tmp_path, text)) == GIB + GIB // 2


def test_exceeded_limit_leaves_nothing(tmp_path: Path) -> None:
    write_cgroup(tmp_path, GIB, 2 * GIB)
    assert cgroup_bytes_left(tmp_path, own(tmp_path, "0::/\n")) == 0


@pytest.mark.parametrize("text", ["", "0::/\n", "nonsense\n", "4:memory:/\n"])
def test_missing_files_mean_no_limit(tmp_path: Path, text: str) -> None:
    assert cgroup_bytes_left(tmp_path, own(tmp_path, text)) is None
    assert cgroup_bytes_left(tmp_path, tmp_path / "missing") is None


def test_host_and_container_both_limit_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(available_memory, "OWN_CGROUP", own(tmp_path, "0::/\n"))
    write_cgroup(tmp_path, 1 << 62, 0)
    assert 0 < available_bytes() <= psutil.virtual_memory().total
    write_cgroup(tmp_path, 3 << 20, 1 << 20)
    assert available_bytes() == 2 << 20
