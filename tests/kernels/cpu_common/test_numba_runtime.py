"""The cache of compiled loops: its key covers every source, and its folder must be private."""

import logging
import os
import shutil
import stat
from pathlib import Path

import pytest

import penstock
from penstock.kernels.cpu_common import numba_runtime

pytestmark = pytest.mark.skipif(not numba_runtime.has_numba(), reason="numba is not installed")

SOURCES = Path(penstock.__file__).parent / "kernels"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The root of a user's caches."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder() -> Path:
    return numba_runtime.cache_folder.__wrapped__()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    "changed",
    [
        "step_graph/opcodes.py",
        "cpu_common/amx_schedule.py",
        "cpu_common/simd.py",
        "attention/triton_launch.py",
    ],
)
def test_every_source_counts(tmp_path: Path, changed: str) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(SOURCES, copy)
    before = numba_runtime.source_digest(copy)
    assert before == numba_runtime.source_digest(SOURCES)
    assert (copy / changed).is_file()
    with (copy / changed).open("a") as file:
        file.write("\n# a change\n")
    assert numba_runtime.source_digest(copy) != before


def test_paths_and_folders_count(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "ops.py").write_text("ADD = 1\n")
    first = numba_runtime.source_digest(tmp_path)
    (tmp_path / "below" / "ops.py").write_text("ADD = 2\n")
    second = numba_runtime.source_digest(tmp_path)
    (tmp_path / "below" / "ops.py").rename(tmp_path / "ops.py")
    assert len({first, second, numba_runtime.source_digest(tmp_path)}) == 3


def test_versions_and_options_count(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite
    import numba

    digests = {numba_runtime.source_digest(SOURCES)}
    monkeypatch.setattr(llvmlite, "__version__", "0.0")
    digests.add(numba_runtime.source_digest(SOURCES))
    monkeypatch.setattr(numba.config, "LOOP_VECTORIZE", 7)
    digests.add(numba_runtime.source_digest(SOURCES))
    assert len(digests) == 3


def test_the_folder_is_made_for_this_user_alone(cache: Path) -> None:
    found = folder()
    digest = numba_runtime.source_digest(SOURCES)
    assert found == cache / "penstock" / "kernels" / digest
    assert {mode(each) for each in (found, found.parent, found.parent.parent)} == {0o700}
    assert folder() == found


def test_a_cache_folder_of_numba_has_one_of_ours(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    assert folder() == tmp_path / "numba" / "penstock" / numba_runtime.source_digest(SOURCES)


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["digest", "kernels", "penstock"])
@pytest.mark.parametrize("others", [0o770, 0o707])
def test_a_folder_that_others_may_write_is_refused(
    cache: Path, depth: int, others: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = folder()
    open_to_others = [found, found.parent, found.parent.parent][depth]
    open_to_others.chmod(others)
    with caplog.at_level(logging.WARNING):
        instead = folder()
    assert cache not in instead.parents
    assert mode(instead) == 0o700
    assert f"{open_to_others} can be written by other users" in caplog.text


@pytest.mark.parametrize("by_link", [False, True])
def test_a_folder_of_somebody_else_is_refused(
    cache: Path, by_link: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder or, with `by_link`, a link to one of our own that another user has made."""
    found = folder()
    theirs = found.parent if not by_link else found
    if by_link:
        found.rename(cache / "elsewhere")
        found.symlink_to(cache / "elsewhere")
    lstat = Path.lstat

    def of_another(path: Path) -> os.stat_result:
        is_of = lstat(path)
        if path == theirs:
            return os.stat_result((*is_of[:4], os.geteuid() + 1, *is_of[5:]))
        return is_of

    monkeypatch.setattr(Path, "lstat", of_another)
    with caplog.at_level(logging.WARNING):
        assert cache not in folder().parents
    assert f"{theirs} belongs to user {os.geteuid() + 1}" in caplog.text


def test_a_link_of_this_user_is_followed(cache: Path) -> None:
    found = folder()
    found.rename(cache / "elsewhere")
    found.symlink_to(cache / "elsewhere")
    assert folder() == found
    (cache / "elsewhere").chmod(0o777)
    assert cache not in folder().parents


def test_a_file_in_the_way_is_told(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("")
    with caplog.at_level(logging.WARNING):
        assert folder().is_dir()
    assert "are not cached" in caplog.text
