"""A replica that is killed while it starts, and a Ray whose raylet is killed under its replicas. A real Ray, without vLLM.

python -m pytest tests/bridge/replicas/test_lost_ray.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
import ray
from bridge.config import ReplicaConfig
from bridge.replicas.actors import ReplicaActors, TooFewReplicasError
from bridge.replicas.replica import Replica
from megasync.launch.ray_cluster import start_ray

class Light(Replica):
    async def start(self):
        first = Path(os.environ["FOLDER"]) / f"begun-{self.index}"
        if not first.exists():
            first.touch()
            if self.index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        self.gate = asyncio.Event()
        return os.getpid()
    async def hand_in(self, groups, num_collects):
        await self.gate.wait()
    async def resume(self):
        self.gate.set()
    async def notes(self):
        return []
    async def close(self):
        pass

class LightActors(ReplicaActors):
    replica_class = Light

found = {}
stop = start_ray("local")
actors = LightActors.start(ReplicaConfig("", "float32", start_timeout_seconds=120.0), 2)
found["members"], found["notes"] = actors.members, actors.drain_notes()
actor = actors._actors[0].handle
waiting = [actor.hand_in.remote([], 0) for _ in range(1500)]
ray.get(actor.resume.remote(), timeout=60)
found["answered"] = len(ray.get(waiting, timeout=60))
raylet = ray._private.worker._global_node.all_processes["raylet"][0].process
os.kill(raylet.pid, signal.SIGKILL)
begin = time.monotonic()
actors.replace(0, 1)
try:
    actors.rejoin(1, 600.0)
except TooFewReplicasError as error:
    found["error"] = str(error)
found["seconds"], found["raylet"] = time.monotonic() - begin, raylet.pid
actors.close()
stop()
print(json.dumps(found))
"""


@pytest.mark.long
def test_a_replica_that_is_killed_while_it_starts_is_tried_again_and_a_lost_raylet_ends_the_wait(tmp_path: Path) -> None:
    command, folder = [sys.executable, "-c", PROGRAM], os.environ | {"FOLDER": str(tmp_path)}
    done = subprocess.run(command, env=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["members"] == [0, 1] and "attempt 1 of 3" in found["notes"][0]
    assert f"the raylet of this run's Ray, process {found['raylet']}, has ended (SIGKILL)" in found["error"]
    assert found["answered"] == 1500, "calls that wait in an actor do not keep out the one that they wait for"
    assert found["seconds"] < 15
