"""Entry point of `python -m penstock.cli`, equivalent to `penstock`."""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main())
