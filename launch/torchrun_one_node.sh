#!/usr/bin/env bash
# Runs a config with torchrun on this machine, one process a rank.
#
#   ./launch/torchrun_one_node.sh CONFIG.yaml [key=value ...] [--nproc N]      # or NPROC=N in the environment
#
# Without N: 2 ranks on a machine without GPUs, else its GPUs less those that the vLLM replicas need. Exit code 0: done;
# 1: failed; 2: config or command are wrong, nothing was started; 75: stopped when asked to; 130: Ctrl-C.
set -euo pipefail
export MEGASYNC_COMMAND="${NPROC:+NPROC=$NPROC }$(printf '%q ' "$0" "$@")" # what goes on after a failure
if [ $# -eq 0 ] || [ "$1" = --help ] || [ "$1" = -h ]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  [ $# -gt 0 ] && exit 0 || exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# exec: it checks the config, then becomes torchrun, so that Ctrl-C and SIGTERM reach torchrun itself, which ends its ranks.
exec "$PYTHON" -m megasync train "$@"
