"""Several clients of one service at once, under random SIGKILLs of server, ranks, replica and clients.

    python -m tests.fuzz_serve --kills 12 --seed 0                 # two ranks, exact, merged weights
    python -m tests.fuzz_serve --kills 12 --seed 0 --mode slots    # one rank: shared passes, adapters in slots
    python -m tests.fuzz_serve --kills 12 --seed 0 --mode data     # two data-parallel ranks: shared passes
    python -m tests.fuzz_serve --kills 12 --seed 0 --mode fsdp     # the same in turns, wrapped by Megatron-FSDP
    python -m tests.fuzz_serve --kills 12 --seed 0 --mode experts  # in turns, adapters of experts over expert-parallel ranks
    python -m tests.fuzz_serve --kills 12 --seed 0 --mode full     # two ranks, one client, all parameters
    python -m tests.fuzz_serve --kills 12 --victims "rank 1" rl    # these alone are killed, each as often as the others

One client takes supervised steps, the others RL steps; one that is killed goes on from its own last saved state. In the end each
has the bits of an unbroken run, weights and optimizer. Prints the seed, each kill and the seconds until all clients went on.
With `--whole FILE` the unbroken run's digests are kept there, for other seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
from safetensors.numpy import load_file

from tests.megasync.service.served import Client, Server

WAIT_SECONDS = 240.0
MODES = {
    "ranks": (2, ("sft", "rl"), ("engine.parallel.pipeline=2", "model.exact=true")),
    "slots": (1, ("sft", "rl", "rl2"), ("engine.lora.sync=adapter", "service.adapter_slots=2")),
    "data": (2, ("sft", "sft2", "rl"), ("engine.lora.sync=adapter", "service.adapter_slots=2")),
    "fsdp": (2, ("sft", "sft2", "rl"), ("engine.wrap=megatron_fsdp", "engine.lora.sync=adapter", "service.adapter_slots=2")),
    "experts": (2, ("sft", "rl"), ("engine.parallel.expert=2",)),
    "full": (
        2,
        ("rl_full",),
        (
            *("engine.parallel.pipeline=2", "model.exact=true", "engine.lora.rank=0"),
            *("service.full_parameters=true", "service.silent_seconds=1"),  # a client that was killed comes back as another
        ),
    ),
}


# ---------------------------------------------------------------------------------------------------- a client's process


async def train(kind: str, url: str, file: Path, num_steps: int) -> None:
    """`file`: the state that it goes on from, after each step its number and the path of what was saved."""
    state = json.loads(file.read_text()) if file.exists() else {"step": 0}
    async with aiohttp.ClientSession() as http:
        client = Client(SimpleNamespace(url=url), http)  # type: ignore[arg-type] # all that it needs of a server
        await client.create(state.get("path", ""), is_full=kind.endswith("full"))
        for step in range(state["step"], num_steps):
            for name in await (rewarded(client, step) if kind.startswith("rl") else client.step(step)):
                await client.fetch(name)
            saved = await client.fetch(await client.ask("save_weights", path=f"s{step}-{os.getpid()}"))
            state = {"step": step + 1, "path": json.loads(saved)["path"]}
            file.with_suffix(".partial").write_text(json.dumps(state))
            file.with_suffix(".partial").rename(file)


async def rewarded(client: Client, step: int) -> list[str]:
    """Responses of the version of now, two to each of three prompts, are trained on."""
    sent = await client.ask("save_weights_for_sampler", sampling_session_seq_id=step)
    session = json.loads(await client.fetch(sent))["sampling_session_id"]
    prompts = [[5, 6, 7 + (step + number) % 100] for number in range(3)]
    answers = await asyncio.gather(*(client.sample(session, 1 + number, each) for number, each in enumerate(prompts)))
    names = []
    for prompt, answer in zip(prompts, answers, strict=True):
        for sequence in answer.sequences:
            tokens = [*prompt, *np.frombuffer(sequence.tokens, np.int32).tolist()]
            log_probs = np.concatenate([[0, 0], np.frombuffer(sequence.logprobs, np.float32)])
            advantages = np.full(len(tokens) - 1, np.mean(tokens) / 128 - 0.5)
            names.append(await client.passes("importance_sampling", tokens, logprobs=log_probs, advantages=advantages))
    return [*names, await client.ask("optim_step", adam_params={"learning_rate": 1e-2})]


class ClientProcess:
    """Started again where it ends before its last step."""

    def __init__(self, kind: str, server: Server, num_steps: int) -> None:
        self.kind, self.server, self.num_steps = kind, server, num_steps
        self.file, self.log = server.folder / f"{kind}.json", server.folder / f"{kind}.log"
        self.start()

    def start(self) -> None:
        given = [sys.executable, "-m", "tests.fuzz_serve", "--client", self.kind, self.server.url, str(self.file)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*given, str(self.num_steps)], stdout=log, stderr=log)

    @property
    def step(self) -> int:
        return int(json.loads(self.file.read_text())["step"]) if self.file.exists() else 0

    def look(self) -> None:
        assert self.process.poll() in (None, 0), f"{self.kind} ended: {self.log.read_text()[-3000:]}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.start()

    def weights(self) -> str:
        """A digest, with the optimizer's state."""
        model, _, name = json.loads(self.file.read_text())["path"].removeprefix("tinker://").split("/")
        folder = self.server.folder / "served/service/models" / model.replace(":", "_") / "weights" / name
        digest = hashlib.sha256()
        for file in sorted(folder.glob("rank_*.safetensors")):
            for key, array in sorted(load_file(file).items()):
                digest.update(f"{file.name} {key}".encode() + array.tobytes())
        return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------- runs with kills


def run(
    folder: Path, mode: str, num_steps: int, num_kills: int, source: random.Random, chosen: Sequence[str] = ()
) -> dict[str, str]:
    """Of each client the digest of its final state. `chosen`: victims, in turns; empty: any, at random."""
    num_ranks, kinds, overrides = MODES[mode]
    family = "qwen3_moe" if mode == "experts" else "qwen3"
    server = Server(folder, num_ranks, *overrides, "service.poll_seconds=2", family=family)
    counts, begin = Counter[str](), time.monotonic()
    server.start()
    clients = [ClientProcess(kind, server, num_steps) for kind in kinds]
    victims = ["server", *(f"rank {rank}" for rank in range(num_ranks)), "replica", *kinds]
    try:
        while (done := sum(client.step for client in clients)) < num_steps * len(clients):
            time.sleep(0.1)
            for client in clients:
                client.look()
            if (number := counts.total()) < num_kills and done >= (number + 1) * num_steps * len(clients) // (num_kills + 2):
                time.sleep(source.random())
                victim = chosen[number % len(chosen)] if chosen else source.choice(victims)
                counts[victim] += 1
                print(f"    kill {number + 1}: {victim}, {kill(victim, server, clients):.1f} s", flush=True)
    finally:
        for client in clients:
            client.process.kill()
        server.end(signal.SIGTERM)
    print(f"    {time.monotonic() - begin:.0f} s, {dict(counts)}", flush=True)
    return {client.kind: client.weights() for client in clients}


def kill(victim: str, server: Server, clients: list[ClientProcess]) -> float:
    """The seconds until all clients have gone on, or are done."""
    begin = time.monotonic()
    chosen = [client for client in clients if client.kind == victim]
    if chosen:
        chosen[0].kill()
    else:
        server.kill(victim)
    steps = [client.step for client in clients]
    while not all(client.step > step or step == client.num_steps for client, step in zip(clients, steps, strict=True)):
        assert time.monotonic() - begin < WAIT_SECONDS, server.log.read_text()[-3000:]
        time.sleep(0.1)
    return time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_serve", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--steps", type=int, default=0, help="of each client; 0: two a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES, default="ranks")
    parser.add_argument("--victims", nargs="+", default=[], help="such as server, 'rank 1', replica, sft")
    parser.add_argument("--whole", type=Path, help="of the same mode and steps")
    parser.add_argument("--client", nargs=4, default=[], help="its own: kind, URL, file of its state, steps")
    given = parser.parse_args()
    if given.client:
        kind, url, file, steps = given.client
        asyncio.run(train(kind, url, Path(file), int(steps)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what was started
    folder, num_steps = Path(tempfile.mkdtemp(prefix="serve-")), given.steps or 2 * given.kills
    print(f"seed {given.seed}, {given.mode}, {num_steps} steps, in {folder}", flush=True)
    if given.whole and given.whole.exists():
        whole = json.loads(given.whole.read_text())
    else:
        whole = run(folder / "whole", given.mode, num_steps, 0, random.Random())
    if given.whole:
        given.whole.write_text(json.dumps(whole))
    broken = run(folder / "broken", given.mode, num_steps, given.kills, random.Random(given.seed), given.victims)
    differing = [kind for kind, digest in whole.items() if broken[kind] != digest]
    print(f"differing: {differing or 'none'}", flush=True)
    if not differing:
        shutil.rmtree(folder)
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
