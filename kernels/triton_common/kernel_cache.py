"""Triton's cache of compiled kernels, with a read-only folder of kernels compiled ahead of time.

A container image contains this folder, `SEED`, which `python -m tests.aot.seed` writes. A new
worker does not compile the kernels in this folder. Other kernels are stored in Triton's own cache.
"""

import json
import os
import sys
from pathlib import Path

from triton.runtime.cache import FileCacheManager

SEED = Path(sys.prefix) / "share" / "penstock" / "kernels"
"""Read-only folder of kernels in this Python environment, with subfolders as in Triton's cache."""

MANAGER_VARIABLE = "TRITON_CACHE_MANAGER"


class SeededCacheManager(FileCacheManager):  # type: ignore[misc]
    """A cache manager of Triton that reads `SEED` for kernels that Triton's own cache lacks."""

    def get_file(self, filename: str) -> str | None:
        """Return the path of a cached file, or None."""
        return super().get_file(filename) or _existing(SEED / self.key / filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the files that were cached together with `filename`, or None.

        Only the names in the group file of `SEED` are used, because the file's absolute paths are
        wrong if the folder was moved.
        """
        own: dict[str, str] | None = super().get_group(filename)
        if own:
            return own
        folder = SEED / self.key
        try:
            names = json.loads((folder / f"__grp__{filename}").read_text())["child_paths"]
        except (OSError, ValueError, KeyError):
            return None
        paths = {name: _existing(folder / name) for name in names}
        return {name: path for name, path in paths.items() if path is not None}


def _existing(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def use_seed() -> None:
    """Make Triton also read `SEED`, if this folder exists and no other cache manager is chosen."""
    if SEED.is_dir():
        name = f"{SeededCacheManager.__module__}:{SeededCacheManager.__qualname__}"
        os.environ.setdefault(MANAGER_VARIABLE, name)
