#!/usr/bin/env bash
# Starts a run in Ray actors: as a job on a cluster (--address), or in a Ray of its own on this machine.
#
#   ./launch/ray_submit.sh CONFIG.yaml [key=value ...] [--address HTTP_ADDRESS] [--num-ranks N] [--no-wait]
set -euo pipefail
export MEGASYNC_COMMAND="$(printf '%q ' "$0" "$@")" # what goes on after a failure
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" -m megasync.submit "$@"
