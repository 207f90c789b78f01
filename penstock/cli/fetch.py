"""`python -m penstock.cli.fetch MODEL FOLDER`: a checkpoint of the hub into a folder.

For machines that only hold it: the pods of the chart, which then find it at one path.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.checkpoint import HUB_NAME, WANTED_FILES, NoModel, download

WEIGHTS = "*.safetensors"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where the hub does not give it."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.cli.fetch", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("model", type=_hub_name, metavar="MODEL", help="its name on the hub")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--without-weights", action="store_true", help="only what a router and a driver read"
    )
    given = parser.parse_args(arguments)
    wanted = [name for name in WANTED_FILES if not (given.without_weights and name == WEIGHTS)]
    try:
        download(given.model, wanted, given.folder)
    except NoModel as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _hub_name(text: str) -> str:
    if not HUB_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a name like owner/model, not {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())
