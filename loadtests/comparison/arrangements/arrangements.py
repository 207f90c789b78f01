"""The arrangements to compare: workers among which the same cores are divided."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One arrangement: a set of workers among which the cores of this machine are divided."""

    name: str
    title: str
    num_workers: int
    flags: tuple[str, ...]  # flags of `penstock serve`
    # False for the default, which is compared with the best static arrangement.
    is_static: bool = True

    def serve_arguments(self, model: str, kv_cache_mib: int, more: tuple[str, ...]) -> list[str]:
        """Return the arguments of `penstock serve`. The workers share `kv_cache_mib`."""
        per_worker = str(kv_cache_mib // self.num_workers)
        # With only one canary per hour, an idle server leaves the cores to the measured server.
        own = ("--kv-cache-mib", per_worker, "--canary-seconds", "3600")
        return [model, *self.flags, *own, *more]


DEFAULT = Arrangement("default", "penstock serve", 2, (), is_static=False)
ARRANGEMENTS = (
    DEFAULT,
    Arrangement("two-mixed", "two mixed workers", 2, ("--mixed", "2")),
    Arrangement("one-mixed", "one mixed worker", 1, ("--mixed", "1")),
)
BY_NAME = {each.name: each for each in ARRANGEMENTS}
