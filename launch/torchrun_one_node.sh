#!/usr/bin/env bash
# Runs a config with torchrun on this machine, one process per rank.
#
#   ./launch/torchrun_one_node.sh CONFIG.yaml [key=value ...] [--nproc N]      # or NPROC=N in the environment
#
# N defaults to 2 ranks on a machine without GPUs, else to its GPUs minus those of the vLLM replicas. Exit code 0: done;
# 1: failed; 2: config or command is wrong, nothing was started; 75: stopped on request; 130: Ctrl-C.
set -euo pipefail
export MEGASYNC_COMMAND="${NPROC:+NPROC=$NPROC }$(printf '%q ' "$0" "$@")" # the command that resumes after a failure
if [ $# -eq 0 ] || [ "$1" = --help ] || [ "$1" = -h ]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  [ $# -gt 0 ] && exit 0 || exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# exec: the process checks the config, then becomes torchrun, so that Ctrl-C and SIGTERM reach torchrun, which ends its ranks.
exec "$PYTHON" -m megasync train "$@"
