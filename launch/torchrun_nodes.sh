#!/usr/bin/env bash
# Runs a config on several nodes: the same line on each. It finds the others, checks them, and starts Ray and torchrun on all.
#
#   ./launch/torchrun_nodes.sh CONFIG.yaml [key=value ...] --nodes N --head HOST[:PORT] [--node-rank R] [--nproc P]
#
# N: how many, or their host names with commas between them. HOST: the node that the others find. --help tells the rest.
# Exit code 0: done; 1: failed, or a node was missing; 2: config, command or a node is not fit; 75: stopped when asked to.
set -euo pipefail
export MEGASYNC_COMMAND="$(printf '%q ' "$0" "$@")" # what goes on after a failure
if [ $# -eq 0 ]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" -m megasync.nodes "$@"
