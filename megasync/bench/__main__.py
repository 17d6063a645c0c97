"""`python -m megasync.bench`: see cli.py."""

import sys

from megasync.bench.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
