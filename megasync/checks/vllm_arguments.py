"""Whether vLLM takes `rollout.engine_arguments`: asked of vLLM itself, in a process of its own, for the seconds of its import.

    ask_vllm(config)    # ConfigError with vLLM's words where it does not

For `--check` alone: a run's replicas ask the same when they start. What vLLM refuses only once it has a device, such as a block
size that no attention kernel has, is not seen.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from megasync.checks.sizes import is_served_here
from megasync.config.errors import ConfigError
from megasync.config.load import save_config
from megasync.config.schema import Config

ASKED, REFUSED = "megasync.run.argument_check", 3
SECONDS, SHOWN = 180.0, 600


def ask_vllm(config: Config) -> None:
    """Where replicas will be on this machine, and there is something to ask. Silent if vLLM cannot be asked: the run tells."""
    rollout = config.rollout
    if config.algorithm.name != "grpo" or not rollout.engine_arguments or not is_served_here(config):
        return
    with tempfile.TemporaryDirectory(prefix="megasync-check-") as folder:
        file = Path(folder) / "config.yaml"
        save_config(config, file)
        command, quiet = [sys.executable, "-m", ASKED, str(file)], subprocess.DEVNULL
        try:
            asked = subprocess.run(command, stdout=subprocess.PIPE, stderr=quiet, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return
    if asked.returncode == REFUSED:
        names = ", ".join(rollout.engine_arguments)
        message = f"rollout.engine_arguments ({names}): vLLM refuses them"
        raise ConfigError(message, vllm_says=asked.stdout[:SHOWN].strip(), remedy="write what vLLM takes, or take them out")
