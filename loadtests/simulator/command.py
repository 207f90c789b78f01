"""`penstock simulate`: runs the routing, scheduling and scaling code in virtual time."""

import sys
from collections.abc import Sequence
from importlib import import_module

KINDS = {
    "load": "simulate a cluster under a load: latencies, worker hours, a page of charts",
    "scaling": "compare the autoscaler with other scalers on several loads and check its goals",
    "disaggregation": "compare the disaggregation rule with always and never disaggregating",
    "routing": "compare the placement strategies on prompts with and without shared prefixes",
    "overload": "measure goodput and first tokens under overload, and beside a greedy tenant",
    "calibrate": "fit the time model to the steps of a running server",
    "compare": "play a load against a running server and in the simulator, side by side",
    "faults": "run seeded fault schedules and check every answer and every KV block",
}
MODULES = {
    "load": "scaling.load",
    "scaling": "scaling.scaling",
    "disaggregation": "scaling.disaggregation",
    "routing": "routing.command",
    "overload": "scaling.overload",
    "calibrate": "calibration.calibrate",
    "compare": "calibration.compare",
    "faults": "faults.faults",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one kind of simulation and return its exit code, or 2 if the kind is unknown.

    With `--help`, print the usage and exit with 0.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("--help", "-h"):
        print(usage())
        sys.exit(0)  # argparse also ends the process after --help
    if name not in KINDS:
        known = ", ".join(KINDS)
        print(f"penstock simulate: unknown kind {name!r}; known kinds: {known}", file=sys.stderr)
        return 2
    code: int = import_module(f"penstock.loadtests.simulator.{MODULES[name]}").main(rest)
    return code


def usage() -> str:
    kinds = [f"  {name:<15}{about}" for name, about in KINDS.items()]
    lines = ["usage: penstock simulate KIND ...", "", *kinds, ""]
    return "\n".join([*lines, "See penstock simulate KIND --help for the options of a kind."])


if __name__ == "__main__":
    sys.exit(main())
