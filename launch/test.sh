#!/usr/bin/env bash
# Sets everything up, then checks style, types and behaviour. Exit code 0: all of it passed.
#
#   ./launch/test.sh                           # ruff, mypy and the tests; where GPUs are, those that need them too
#   ./launch/test.sh --all                     # the same with the tests marked long: faults, lost nodes, clusters, exact tables
#   ./launch/test.sh tests/engine/test_engine.py -x   # arguments go to pytest, and only pytest runs
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$MEGASYNC_ROOT"
unset PYTHONDONTWRITEBYTECODE # containers set it, and each of some hundred processes would compile our modules again
status=0
with_gpus=false
types=
everything=()
[ "${1:-}" != --all ] || { everything=("$@"); shift $#; }
if [ $# -eq 0 ]; then # three workers on two cores, since a test often waits; each takes up to 5 GB
  [ "$MEGASYNC_LANE" = gpu ] && with_gpus=true
  "$PYTHON" -m ruff check . || status=1
  types=$(mktemp)
  "$PYTHON" -m mypy >"$types" 2>&1 & # beside the tests: it takes one core
  mypy=$!
  workers=$((($(env -u OMP_NUM_THREADS nproc) * 3 + 1) / 2)) most=$(($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 1024 / 6144))
  [ "$workers" -le "$most" ] || workers=$most
  [ "$workers" -ge 2 ] || workers=2
  set -- --numprocesses "$workers" --dist loadfile --no-loadscope-reorder "${everything[@]}"
fi
"$PYTHON" -m pytest "$@" || status=$?
if [ -n "$types" ]; then
  wait "$mypy" || status=1
  cat "$types"
  rm "$types"
fi
if $with_gpus; then "$PYTHON" -m pytest -m gpu || status=$?; fi # one after the other: they share the GPUs
exit $status
