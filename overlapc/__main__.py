"""`python -m overlapc` does the same as `overlapc`."""

import sys

from overlapc.cli import main

if __name__ == "__main__":
    sys.exit(main())
