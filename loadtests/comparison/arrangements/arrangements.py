"""The arrangements to compare: workers among which the same cores are divided."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.cli.role import change
from penstock.loadtests.bench.metrics import Goals


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One arrangement: a set of workers among which the cores of this machine are divided."""

    name: str
    title: str
    num_workers: int
    flags: tuple[str, ...]  # flags of `penstock serve`
    # False only for the default. The default is compared with the best static arrangement without
    # SLOs, and the default with SLOs with the best static arrangement with SLOs.
    is_static: bool = True
    has_slo: bool = False  # whether the server gets the goals of the loads as its SLOs
    # Whether each worker keeps its share of the cores while other workers are idle.
    has_fixed_threads: bool = False
    # Roles that an operator assigns after the start, by worker name.
    roles: Mapping[str, str] = field(default_factory=dict)

    def serve_arguments(
        self, model: str, kv_cache_mib: int, more: tuple[str, ...], goals: Goals
    ) -> list[str]:
        """Return the arguments of `penstock serve`. The workers share `kv_cache_mib`."""
        per_worker = str(kv_cache_mib // self.num_workers)
        # With only one canary per hour, an idle server leaves the cores to the measured server.
        own = ["--kv-cache-mib", per_worker, "--canary-seconds", "3600"]
        if self.has_fixed_threads:
            threads = max(1, len(os.sched_getaffinity(0)) // self.num_workers)
            own += ["--threads", str(threads)]
        if self.has_slo:
            for name, milliseconds in (("ttft", goals.ttft), ("tpot", goals.tpot)):
                if milliseconds is not None:
                    own += [f"--{name}-slo-seconds", f"{milliseconds / 1000:g}"]
        return [model, *self.flags, *own, *more]

    async def assign_roles(self, admin_address: str) -> None:
        """Assign this arrangement's roles through a router's operators' port. Raises NoStatus."""
        for worker, role in self.roles.items():
            await asyncio.to_thread(change, admin_address, "", worker, role)

    def with_slo(self) -> "Arrangement":
        """Return this arrangement with the goals of the loads as SLOs of the server."""
        name, title = f"{self.name}-slo", f"{self.title} with SLOs"
        return replace(self, name=name, title=title, has_slo=True)


DEFAULT = Arrangement("default", "penstock serve", 2, (), is_static=False)
ARRANGEMENTS = (
    DEFAULT,
    Arrangement("two-mixed", "two mixed workers", 2, ("--mixed", "2")),
    Arrangement("one-mixed", "one mixed worker", 1, ("--mixed", "1")),
    # Without the assigned role, the router would also generate answers on the prefill worker.
    Arrangement(
        "fixed-pair",
        "fixed prefill and decode",
        2,
        ("--prefill", "1", "--decode", "1"),
        has_fixed_threads=True,
        roles={"prefill-0": "prefill"},
    ),
)
WITH_SLO = tuple(each.with_slo() for each in ARRANGEMENTS)
BY_NAME = {each.name: each for each in (*ARRANGEMENTS, *WITH_SLO)}
