#!/usr/bin/env bash
# Checks that pip finds every package of a lock for its Python on x86-64 Linux. Reads metadata; installs nothing; takes minutes.
#
#   ./launch/check_locks.sh                      # locks/cpu.txt and smollm2.txt for Python 3.11, locks/gpu.txt for 3.12
#   ./launch/check_locks.sh locks/cpu.txt 3.13   # one lock, for one Python
#
# Exit code 0: all found; 1: prints the missing ones. MEGASYNC_PYTHON: the Python whose pip is used (default: python3).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${MEGASYNC_PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for_python() { # VERSION: prints pip's options for wheels of that Python, wherever this runs
  local glibc
  printf '%s\n' --only-binary=:all: --implementation cp --python-version "$1" --platform linux_x86_64
  for glibc in $(seq 5 35); do printf '%s\n' --platform "manylinux_2_${glibc}_x86_64"; done
  for glibc in 1 2010 2014; do printf '%s\n' --platform "manylinux${glibc}_x86_64"; done
}

check() { # LOCK VERSION
  local options missing=() line
  mapfile -t options < <(for_python "$2")
  cp "$1" "$work/left.txt"
  # pip stops at the first line that it does not find: remove that line and try again
  until "$python" -m pip install --dry-run --quiet --no-deps --ignore-installed --no-input --target "$work/target" \
    "${options[@]}" --requirement "$work/left.txt" 2>"$work/said.txt"; do
    line=$(sed -n 's/^ERROR: No matching distribution found for //p' "$work/said.txt" | head -n 1)
    if [ -z "$line" ] || ! grep -qxF "$line" "$work/left.txt"; then
      tail -n 5 "$work/said.txt" >&2
      return 1
    fi
    missing+=("$line")
    grep -vxF "$line" "$work/left.txt" >"$work/next.txt" || true
    mv "$work/next.txt" "$work/left.txt"
  done
  echo "$1, Python $2: $(wc -l <"$work/left.txt") of $(wc -l <"$1") lines are there${missing[*]:+; missing: ${missing[*]}}"
  [ ${#missing[@]} -eq 0 ]
}

if [ $# -eq 2 ]; then
  check "$1" "$2"
elif [ $# -eq 0 ]; then
  status=0
  check "$root/locks/cpu.txt" 3.11 || status=1
  check "$root/locks/gpu.txt" 3.12 || status=1
  check "$root/locks/smollm2.txt" 3.11 || status=1
  exit $status
else
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
