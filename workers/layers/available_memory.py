"""Returns the memory that a CPU worker may still use, within the limits of its container."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Return the available bytes of the host, or of this process's cgroup if it has fewer."""
    import psutil  # imported here because GPU-only installations may lack it, see docs/gpu.md

    host = int(psutil.virtual_memory().available)
    left = cgroup_bytes_left(CGROUPS, OWN_CGROUP)
    return host if left is None else min(host, left)


def cgroup_bytes_left(cgroups: Path, own: Path) -> int | None:
    """Return how many bytes the limits of a process's cgroups still allow, at least 0.

    A limit of a parent cgroup also applies to its children. Cached file data that the kernel can
    drop does not count as used.

    Args:
        cgroups: folder in which the cgroup file systems are mounted.
        own: file with the cgroups of the process, in the form of `/proc/self/cgroup`.

    Returns:
        None if there is no limit, or if the files cannot be read.
    """
    left = [
        found
        for folder, names in _folders(cgroups, own)
        if (found := _bytes_left(folder, *names)) is not None
    ]
    return min(left, default=None)


_V2 = ("memory.max", "memory.current", "")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
"""Names of the files with the limit and the used bytes, and prefix of the keys in memory.stat."""


def _folders(cgroups: Path, own: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of the process's memory cgroups, with `_V2` or `_V1`.

    In a container, the path of a process may name a cgroup outside of the container. Then only the
    mounted folder itself exists, and it is the cgroup of the container.
    """
    try:
        lines = own.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            yield each, names
            if each == top:
                break


def _bytes_left(folder: Path, limit: str, used: str, prefix: str) -> int | None:
    try:
        # "max" means no limit; int() refuses it
        limit_bytes = int((folder / limit).read_text("ascii"))
        used_bytes = int((folder / used).read_text("ascii"))
        lines = (folder / "memory.stat").read_text("ascii").splitlines()
    except (OSError, ValueError):
        return None
    stat = dict(line.split(maxsplit=1) for line in lines if " " in line)
    # File data that was read twice is active; the kernel can drop it too.
    cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return min(max(limit_bytes - used_bytes + cached, 0), limit_bytes)
