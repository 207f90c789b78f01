"""Entry point of `python -m penstock.cli`, which does the same as `penstock`."""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main())
