"""The disk cache of compiled loops: its key covers all sources, and its folder is private."""

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
    """Return the root of the user's caches, set by XDG_CACHE_HOME."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder() -> Path:
    return numba_runtime._choose_cache_folder.__wrapped__()[0]


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
def test_digest_depends_on_every_source_file(tmp_path: Path, changed: str) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(SOURCES, copy)
    before = numba_runtime.source_digest(copy)
    assert before == numba_runtime.source_digest(SOURCES)
    assert (copy / changed).is_file()
    with (copy / changed).open("a") as file:
        file.write("\n# a change\n")
    assert numba_runtime.source_digest(copy) != before


def test_digest_depends_on_contents_and_paths(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "ops.py").write_text("ADD = 1\n")
    first = numba_runtime.source_digest(tmp_path)
    (tmp_path / "below" / "ops.py").write_text("ADD = 2\n")
    second = numba_runtime.source_digest(tmp_path)
    (tmp_path / "below" / "ops.py").rename(tmp_path / "ops.py")
    assert len({first, second, numba_runtime.source_digest(tmp_path)}) == 3


def test_digest_depends_on_compiler_version_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite
    import numba

    digests = {numba_runtime.source_digest(SOURCES)}
    monkeypatch.setattr(llvmlite, "__version__", "0.0")
    digests.add(numba_runtime.source_digest(SOURCES))
    monkeypatch.setattr(numba.config, "LOOP_VECTORIZE", 7)
    digests.add(numba_runtime.source_digest(SOURCES))
    assert len(digests) == 3


def test_cache_folder_is_private_to_its_user(cache: Path) -> None:
    found = folder()
    digest = numba_runtime.source_digest(SOURCES)
    assert found == cache / "penstock" / "kernels" / digest
    assert {mode(each) for each in (found, found.parent, found.parent.parent)} == {0o700}
    assert folder() == found


def test_cache_folder_is_below_numba_cache_dir_if_that_is_set(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    assert folder() == tmp_path / "numba" / "penstock" / numba_runtime.source_digest(SOURCES)


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["digest", "kernels", "penstock"])
@pytest.mark.parametrize("others", [0o770, 0o707])
def test_a_folder_writable_by_other_users_is_not_used(
    cache: Path, depth: int, others: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = folder()
    writable = [found, found.parent, found.parent.parent][depth]
    writable.chmod(others)
    with caplog.at_level(logging.WARNING):
        fallback = folder()
    assert cache not in fallback.parents
    assert mode(fallback) == 0o700
    assert f"{writable} can be written by other users" in caplog.text


@pytest.mark.parametrize("by_link", [False, True])
def test_a_folder_or_link_of_another_user_is_not_used(
    cache: Path, by_link: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `by_link`, the folder is reached through a link that another user has made."""
    found = folder()
    foreign = found.parent if not by_link else found
    if by_link:
        found.rename(cache / "elsewhere")
        found.symlink_to(cache / "elsewhere")
    lstat = Path.lstat

    def foreign_lstat(path: Path) -> os.stat_result:
        status = lstat(path)
        if path == foreign:
            return os.stat_result((*status[:4], os.geteuid() + 1, *status[5:]))
        return status

    monkeypatch.setattr(Path, "lstat", foreign_lstat)
    with caplog.at_level(logging.WARNING):
        assert cache not in folder().parents
    assert f"{foreign} belongs to user {os.geteuid() + 1}" in caplog.text


def test_a_link_of_the_same_user_is_followed(cache: Path) -> None:
    found = folder()
    found.rename(cache / "elsewhere")
    found.symlink_to(cache / "elsewhere")
    assert folder() == found
    (cache / "elsewhere").chmod(0o777)
    assert cache not in folder().parents


def test_a_file_in_place_of_the_folder_is_logged(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("")
    with caplog.at_level(logging.WARNING):
        assert folder().is_dir()
    assert "are not cached" in caplog.text
