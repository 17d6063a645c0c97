"""Asks vLLM whether it takes the arguments of a config, without starting it.

    python -m megasync.run.argument_check config.yaml    # exit code 3, and vLLM's words, where it does not

Leaves out who wants to know (checks/data.py).
"""

from __future__ import annotations

import os
import sys

from bridge.vllm.serving import api
from megasync.checks.data import REFUSED
from megasync.config.load import load_config
from megasync.launch.devices import visible_devices
from megasync.run.replica_start import replica_config


def main() -> int:
    config = replica_config(load_config(sys.argv[1], []))
    os.environ |= api.environment(cuda=bool(visible_devices()))
    engine_args, _ = api.import_engine()
    api.choose_layers(config)
    try:
        engine_args(**api.engine_arguments(config)).create_engine_config()
    except (TypeError, ValueError, NotImplementedError) as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
