"""The arrangements to compare: workers among which the same cores are divided."""

from dataclasses import dataclass, replace

from penstock.loadtests.bench.metrics import Goals


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One arrangement: a set of workers among which the cores of this machine are divided."""

    name: str
    title: str
    num_workers: int
    flags: tuple[str, ...]  # flags of `penstock serve`
    # False for the default, which is compared with the best static arrangement. With SLOs, it is
    # compared with the best static arrangement that has SLOs too.
    is_static: bool = True
    has_slo: bool = False  # whether the server gets the goals of the loads as its SLOs

    def serve_arguments(
        self, model: str, kv_cache_mib: int, more: tuple[str, ...], goals: Goals
    ) -> list[str]:
        """Return the arguments of `penstock serve`. The workers share `kv_cache_mib`."""
        per_worker = str(kv_cache_mib // self.num_workers)
        # With only one canary per hour, an idle server leaves the cores to the measured server.
        own = ["--kv-cache-mib", per_worker, "--canary-seconds", "3600"]
        if self.has_slo:
            for name, milliseconds in (("ttft", goals.ttft), ("tpot", goals.tpot)):
                if milliseconds is not None:
                    own += [f"--{name}-slo-seconds", f"{milliseconds / 1000:g}"]
        return [model, *self.flags, *own, *more]

    def with_slo(self) -> "Arrangement":
        """Return this arrangement with the goals of the loads as SLOs of the server."""
        name, title = f"{self.name}-slo", f"{self.title} with SLOs"
        return replace(self, name=name, title=title, has_slo=True)


DEFAULT = Arrangement("default", "penstock serve", 2, (), is_static=False)
ARRANGEMENTS = (
    DEFAULT,
    Arrangement("two-mixed", "two mixed workers", 2, ("--mixed", "2")),
    Arrangement("one-mixed", "one mixed worker", 1, ("--mixed", "1")),
)
WITH_SLO = tuple(each.with_slo() for each in ARRANGEMENTS)
BY_NAME = {each.name: each for each in (*ARRANGEMENTS, *WITH_SLO)}
