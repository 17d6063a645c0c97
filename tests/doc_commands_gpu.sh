#!/usr/bin/env bash
# The documents' commands that need a GPU, from a fresh copy, made shorter on one GPU: tests/doc_commands_gpu.sh OUT [key=value ...]
# As written on all GPUs ($CUDA_VISIBLE_DEVICES): doc_commands_gpu.sh OUT --as-written [--others REGEX], with TIME=1200 LIMIT=700.
# The packages are those of $PYTHON, SmolLM2 and its data those in $ASSETS (/tmp/smollm2), where it is there. Writes OUT/commands.jsonl,
# a line a command as it ends, with exit code and seconds, for the quickstart also those until its first RL step, and a log of each.
# Shorter they take about five minutes: nothing begins after $TIME seconds (240), none takes more than $LIMIT (200), and $BESIDE (5)
# share the GPU at the end.
# tests/doc_commands_gpu.py says what is made shorter.
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE # where torch comes without compiled files each process would compile it again
out=$1; shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)
PYTHON=$(command -v "${PYTHON:-python3}")
fresh=$(mktemp -d)/megasync
mkdir -p "$fresh" "$fresh.bin"
(cd "$here" && tar --exclude=./.git --exclude=./.venv --exclude=./runs --exclude=./shared --exclude='*.log' -cf - .) | tar -xf - -C "$fresh"
printf '#!/usr/bin/env bash\nexec "%s" -m megasync "$@"\n' "$PYTHON" > "$fresh.bin/megasync" # what pip would install
printf '#!/usr/bin/env bash\nexec "%s" "$@"\n' "$PYTHON" > "$fresh.bin/python"
chmod +x "$fresh.bin"/*
export PATH=$fresh.bin:$PATH MEGASYNC_PYTHON=$PYTHON
if [[ " $* " != *" --as-written "* ]]; then
  one=${CUDA_VISIBLE_DEVICES-0}
  export CUDA_VISIBLE_DEVICES=${one%%,*}
fi
cd "$fresh" || exit 1
[ ! -d "${ASSETS:=/tmp/smollm2}" ] || ln -s "$ASSETS" smollm2
source launch/setup.sh
"$PYTHON" -m tests.doc_commands_gpu "$out" --seconds "${TIME:-240}" --limit "${LIMIT:-200}" --beside "${BESIDE:-5}" "$@"
code=$?
rm -rf "$fresh" "$fresh.bin"
exit $code
