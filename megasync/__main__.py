"""`python -m megasync`: see cli.py."""

from megasync.cli import entry

if __name__ == "__main__":
    entry()
