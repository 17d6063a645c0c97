"""Stands for the agent of Ray's dashboard on a node: says that it has no ports, and ends with the raylet, which has started it.

Ray does not start without one (ray 2.60.0: "Dashboard agent command must be non empty"). Its own takes two seconds of a core and
100 MB for metrics and a dashboard that nobody asks a run's Ray for. Imports nothing of Ray, whose files of ports it writes
(`persist_port` of ray._raylet).

    python -S ray_agent.py --node-id=ID --session-dir=FOLDER ...
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NONE = "-1"  # as Ray's own writes that has been installed without a dashboard (dashboard/agent.py:105)


def main(arguments: list[str]) -> None:
    raylet = os.getppid()
    descriptor = os.pidfd_open(raylet)
    if os.getppid() != raylet:
        return
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    for name in PORTS:
        path = Path(options["--session-dir"]) / f"{name}_{options['--node-id']}"
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(NONE, encoding="ascii")
        partial.rename(path)
    select.select([descriptor], [], [])


if __name__ == "__main__":
    main(sys.argv[1:])
