#!/usr/bin/env bash
# Sets up, then trains a small model with RL, end to end, on this machine's GPUs or CPU: about 5 minutes on 2 cores.
#
#   ./launch/quickstart.sh                    # Megatron-FSDP
#   ./launch/quickstart.sh engine.wrap=ddp    # any key=value of configs/quickstart.yaml
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$MEGASYNC_ROOT" # results go to runs/quickstart of this clone
exec "$PYTHON" -m megasync quickstart "$@"
