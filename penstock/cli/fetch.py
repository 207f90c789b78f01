"""Download a checkpoint from the hub: `python -m penstock.cli.fetch MODEL FOLDER`.

Each pod of the Helm chart runs this command, so that all pods have the checkpoint at the same path.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.checkpoint import HUB_NAME, WANTED_FILES, NoModel, download

WEIGHTS = "*.safetensors"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if the download failed, and 0 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.cli.fetch", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("model", type=_hub_name, metavar="MODEL", help="name on the hub")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--without-weights",
        action="store_true",
        help="skip the weights, which routers and the supervisor do not need",
    )
    parser.add_argument(
        "--revision", metavar="TEXT", help="commit, tag or branch; default: the main branch"
    )
    given = parser.parse_args(arguments)
    wanted = [name for name in WANTED_FILES if not (given.without_weights and name == WEIGHTS)]
    try:
        download(given.model, wanted, given.folder, given.revision)
    except NoModel as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _hub_name(text: str) -> str:
    if not HUB_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected a hub name like owner/model, not {text!r:.80}")
    return text


if __name__ == "__main__":
    sys.exit(main())
