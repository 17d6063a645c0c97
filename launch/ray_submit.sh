#!/usr/bin/env bash
# Submits a run through Ray's job API, to a cluster (--address) or to a local one that ends with the run.
#
#   ./launch/ray_submit.sh CONFIG.yaml [key=value ...] [--address HTTP_ADDRESS] [--num-ranks N] [--no-wait]
set -euo pipefail
export MEGASYNC_COMMAND="$(printf '%q ' "$0" "$@")" # the command that resumes after a failure
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" -m megasync.submit "$@"
