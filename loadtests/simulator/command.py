"""`penstock simulate`: the cluster's deciding code in virtual time."""

import sys
from collections.abc import Sequence
from importlib import import_module

KINDS = {
    "load": "play a cluster under a load: latencies, worker hours, a page of charts",
    "scaling": "play the autoscaler beside others on several loads, and judge it",
    "disaggregation": "play the rule that computes prompts apart beside always and never",
    "faults": "play seeded fault schedules and check every answer and every block",
}
MODULES = {
    "load": "scaling.load",
    "scaling": "scaling.scaling",
    "disaggregation": "scaling.disaggregation",
    "faults": "faults.faults",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a kind of simulation; 2 for one that there is not. Exits with 0 after --help."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("--help", "-h"):
        print(usage())
        sys.exit(0)  # as argparse does for the other commands
    if name not in KINDS:
        known = ", ".join(KINDS)
        print(f"penstock simulate: there is no {name!r}; known are {known}", file=sys.stderr)
        return 2
    code: int = import_module(f"penstock.loadtests.simulator.{MODULES[name]}").main(rest)
    return code


def usage() -> str:
    kinds = [f"  {name:<15}{about}" for name, about in KINDS.items()]
    lines = ["usage: penstock simulate KIND ...", "", *kinds, ""]
    return "\n".join([*lines, "penstock simulate KIND --help tells its options."])


if __name__ == "__main__":
    sys.exit(main())
