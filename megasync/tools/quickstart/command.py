"""Writes a small model and its data, warms the model up with supervised steps, and trains it with GRPO.

Both phases run the ordinary training program under torchrun, as with a config of your own. The overrides `engine.*` (except
`engine.optimizer.*` and `engine.lora.*`), `run.seed`, `run.dir`, `run.progress` and `model.dtype` apply to both phases; all
others apply only to RL. A second quickstart in the same folder deletes the results of the first one, after it has checked both
phases.

Without GPUs there are 2 ranks on the CPU. On one GPU trainer and replica take turns (`rollout.placement=colocated`); with more
GPUs the replica has its own, and the trainer one or two.

    megasync quickstart [key=value ...] [--nproc N]      # or ./launch/quickstart.sh, which installs megasync first
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasync.checks.check import check_config
from megasync.config.errors import ConfigError, main_errors
from megasync.config.files import lock, write_atomically
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.config.shipped import shipped
from megasync.launch.devices import visible_devices
from megasync.launch.exit_summary import exit_summary
from megasync.launch.num_ranks import NUM_CPU_RANKS, default_num_ranks
from megasync.launch.processes import STOPPED, run_to_end, torchrun
from megasync.tools.assets.command import Assets, assets_in

WARM_UP, RL = shipped("configs/quickstart_sft.yaml"), shipped("configs/quickstart.yaml")
FOR_BOTH = ("engine.", "run.seed=", "run.dir=", "run.progress=", "model.dtype=")
FOR_RL_ALONE = ("engine.optimizer.", "engine.lora.", "engine.lora=")
MARKER = ".megasync-quickstart"  # marks folders that a quickstart created and may clear
NEW = ".new"  # subfolder for the assets until both phases were checked
# flash attention needs 16-bit dtypes; compiling and recording CUDA graphs would take longer than the whole quickstart
ON_GPUS = ("model.dtype=bfloat16", "engine.fusions=none", "rollout.enforce_eager=true", "rollout.gpu_memory_utilization=0.3")


@dataclass(frozen=True)
class Phase:
    """One run of the training program: a config file and overrides."""

    config_file: Path
    overrides: list[str]

    @property
    def config(self) -> Config:
        return load_config(self.config_file, self.overrides)

    def check(self, num_ranks: int) -> None:
        """Raises ConfigError if the phase cannot run."""
        check_config(self.config, num_ranks)

    def run(self, num_ranks: int) -> int:
        """Runs the phase and returns its exit code. After a stop request, prints the command that resumes it."""
        code = run_to_end(torchrun(num_ranks, "megasync.train", str(self.config_file), *self.overrides))
        if code == STOPPED:
            command = ["megasync", "train", str(self.config_file), *self.overrides, "--nproc", str(num_ranks)]
            print(f"{exit_summary(self.config, shlex.join(command))}\na quickstart in this folder starts afresh", flush=True)
        return code


def shared_overrides(overrides: Sequence[str]) -> list[str]:
    """The user's overrides that also apply to the warm-up."""
    return [one for one in overrides if one.startswith(FOR_BOTH) and not one.startswith(FOR_RL_ALONE)]


def for_machine(overrides: Sequence[str], gpus: int) -> list[str]:
    """Defaults for a machine with so many GPUs, followed by the user's overrides."""
    if gpus == 0:
        return list(overrides)
    return [*ON_GPUS, f"rollout.placement={'colocated' if gpus == 1 else 'separate'}", *overrides]


def num_quickstart_ranks(overrides: Sequence[str], gpus: int) -> int:
    """Number of trainer ranks: as the GPUs allow, at most NUM_CPU_RANKS, since the batches are small.

    Raises:
        ConfigError: the replicas leave no GPU for the trainer.
    """
    return min(NUM_CPU_RANKS, default_num_ranks(load_config(RL, overrides), gpus))


def override(key: str, path: Path) -> str:
    """The override `key=path`, quoted for YAML."""
    return f"{key}={json.dumps(str(path))}"


def warm_up_phase(overrides: Sequence[str], folder: Path, assets: Assets) -> Phase:
    """The phase of supervised steps on the untrained model."""
    given = [override("model.path", assets.model), *_data(assets), *shared_overrides(overrides)]
    return Phase(WARM_UP, [*given, override("run.dir", folder)])


def rl_phase(overrides: Sequence[str], folder: Path, assets: Assets, model: Path) -> Phase:
    """The phase of GRPO on `model`."""
    return Phase(RL, [override("model.path", model), *_data(assets), *overrides, override("run.dir", folder)])


def _data(assets: Assets) -> list[str]:
    return [override("data.train", assets.train), override("data.eval", assets.held_out)]


@contextmanager
def afresh(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Creates and locks the folder, and a new one in it for the block. After the block the `names` of a former quickstart are
    deleted, and the contents of the new folder replace them; if it raises, the new folder is deleted.

    Raises:
        ConfigError: the folder holds files of something else, is not writable, or a run is active in it.
    """
    remedy = "write run.dir=FOLDER for a new folder of yours"
    lock(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise ConfigError(f"run.dir = {folder}: holds files that no quickstart made", remedy=remedy)
    left, new = [name for name in dict.fromkeys(names) if (folder / name).exists()], folder / NEW
    for run_folder in (folder / name for name in left if (folder / name).is_dir()):
        if (lock_of_run := lock(run_folder)) is not None:
            os.close(lock_of_run)
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        (folder / MARKER).touch()
    except OSError as error:
        raise ConfigError(f"run.dir = {folder}: the folder cannot be written: {error.strerror}", remedy=remedy) from error
    try:
        yield new
        if left:
            print(f"starting from scratch: deletes {', '.join(left)} of a former quickstart in {folder}", flush=True)
        for path in (folder / name for name in left):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in new.iterdir():
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def announce(text: str) -> None:
    """Prints a headline."""
    from rich.console import Console

    Console().rule(f"[bold]{text}", align="left")


def show_summary(summary: dict[str, Any]) -> None:
    """Prints the figures of the whole quickstart as a table."""
    from rich.console import Console
    from rich.table import Table

    before, after = summary.get("eval_reward_before"), summary.get("eval_reward_after")
    table = Table(title="quickstart", show_header=False, title_justify="left")
    if before is not None and after is not None:  # data.eval may be empty, or sets
        table.add_row("held-out reward before RL, greedy", f"{before:.3f}")
        table.add_row("held-out reward after RL, greedy", f"{after:.3f}  ({after - before:+.3f})")
    table.add_row("weight syncs", f"{summary['num_syncs']}")
    if summary["num_syncs"]:  # none with algorithm.name=sft
        table.add_row("one sync, median", f"{summary['sync_seconds_median'] * 1e3:.0f} ms")
        table.add_row("one sync, size", f"{summary['sync_bytes'] / 2**20:.2f} MiB")
    table.add_row("time, warm-up and RL", f"{summary['seconds_total']:.0f} s")
    console = Console(soft_wrap=True)
    console.print(table)
    for name in ("summary", "report", "timeline"):
        console.print(f"{name:<9}{summary[name]}", highlight=False)


def summarise(folder: Path, run_folder: Path, seconds: float) -> dict[str, Any]:
    """The RL run's summary, with `seconds_total` of both phases and paths of results; also written to `folder`."""
    summary = json.loads((run_folder / "summary.json").read_text(encoding="utf-8"))
    paths = {"summary": folder / "summary.json", "report": run_folder / "report.html"}
    paths["timeline"] = run_folder / "timeline.json"
    summary |= {"seconds_total": seconds} | {name: str(path) for name, path in paths.items()}
    write_atomically(paths["summary"], json.dumps(summary, indent=2) + "\n")
    return dict(summary)


def quickstart(overrides: Sequence[str], num_ranks: int) -> int:
    """Runs all phases; returns the exit code of the first phase that failed, else 0.

    Raises:
        ConfigError: an override is wrong; nothing was started.
    """
    started = time.monotonic()
    config = load_config(RL, overrides)
    folder = Path(config.run.dir).resolve()
    announce("1/3  a small model, untrained, and its data")
    from megasync.tools.assets.command import write_assets

    with afresh(folder, ["assets", load_config(WARM_UP).run.name, config.run.name, "summary.json"]) as new:
        assets = write_assets(new / "assets", config.run.seed, config.model.dtype)
        for phase in (warm_up_phase(overrides, new, assets), rl_phase(overrides, new, assets, assets.model)):
            phase.check(num_ranks)
    assets = assets_in(folder / "assets")
    warm_up = warm_up_phase(overrides, folder, assets)
    print(f"{assets.model}\n{assets.train}\n{assets.held_out}", flush=True)

    announce(f"2/3  warm-up: supervised steps, Megatron ranks: {num_ranks}, {config.engine.wrap}")
    if code := warm_up.run(num_ranks):
        return code
    rl = rl_phase(overrides, folder, assets, warm_up.config.run.folder / "hf")
    where = "vLLM in a Ray actor on the same GPUs" if rl.config.rollout.is_colocated else "vLLM in a Ray actor"
    announce(f"3/3  RL: Megatron ranks: {num_ranks}, {where}, weights streamed after every step")
    if code := rl.run(num_ranks):
        return code
    show_summary(summarise(folder, rl.config.run.folder, time.monotonic() - started))
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code 0: done; 2: wrong override; else the exit code of the phase that failed."""
    parser = argparse.ArgumentParser(
        prog="megasync quickstart",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="overrides of configs/quickstart.yaml")
    parser.add_argument("--nproc", type=int, help="trainer ranks (default: 2, on 1 or 2 GPUs 1)")
    options = parser.parse_intermixed_args(argv)
    with main_errors():
        gpus = len(visible_devices())
        overrides = for_machine(options.overrides, gpus)
        return quickstart(overrides, options.nproc or num_quickstart_ranks(overrides, gpus))
