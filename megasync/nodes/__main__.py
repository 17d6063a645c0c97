"""`python -m megasync.nodes`: see command.py."""

from megasync.launch.processes import run_and_leave
from megasync.nodes.command import main

if __name__ == "__main__":
    run_and_leave(main)
