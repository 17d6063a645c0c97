#!/usr/bin/env bash
# Runs a config on several nodes; run the same command on each. Checks the nodes, then starts Ray and torchrun on all of them.
#
#   ./launch/torchrun_nodes.sh CONFIG.yaml [key=value ...] --nodes N --head HOST[:PORT] [--node-rank R] [--nproc P]
#
# N: number of nodes, or their host names separated by commas. HOST: the node that the others connect to. --help: all options.
# Exit code 0: done; 1: failed, or a node was missing; 2: config, command or a node is wrong; 75: stopped on request.
set -euo pipefail
export MEGASYNC_COMMAND="$(printf '%q ' "$0" "$@")" # the command that resumes after a failure
if [ $# -eq 0 ]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$PYTHON" -m megasync.nodes "$@"
