#!/usr/bin/env bash
# TRL's GRPOTrainer and ours one after another on one GPU, the same task, seed by seed: bench/peers/run.sh OUT SEED [SEED ...]
# Model and data are in $ASSETS (what `megasync assets` wrote), TRL's wheels in $WHEELS where it is not installed. EXTRA="key=value ..."
# goes to both, OURS to ours, TRL to trl_grpo.py. LIMIT is the seconds that one run may take in all, STEPS how many steps it is to make.
# Writes OUT/trlSEED, OUT/megasyncSEED with figures of each step as it goes, a log beside each, and OUT/peers.json and peers.txt with what they come to.
set -uo pipefail
out=$1; shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3} steps=${STEPS:-60} limit=${LIMIT:-180} assets=${ASSETS:-/tmp/smollm2}
mkdir -p "$out"
out=$(cd "$out" && pwd)
trl_path=
if [ -n "${WHEELS:-}" ]; then
  trl_path=$out/site-packages
  for wheel in "$WHEELS"/trl-*.whl; do "$python" -m zipfile -e "$wheel" "$trl_path"; done
  "$python" -c 'import accelerate' 2>/dev/null || for wheel in "$WHEELS"/accelerate-*.whl; do "$python" -m zipfile -e "$wheel" "$trl_path"; done
fi
# dill 0.4.1 takes packages outside of a folder of this name for the user's own and pickles them by value, on which datasets 5.2 fails
if ! "$python" -c 'import pyarrow; from dill._dill import _is_builtin_module as is_known; raise SystemExit(not is_known(pyarrow))'; then
  echo "the packages lie in a folder that TRL's data sets cannot be pickled from; move them to one named site-packages" >&2
  exit 2
fi
# Both sides: no staleness, one optimizer step a batch, vLLM on the trainer's GPU, its graphs captured for decoding and nothing compiled.
task=(
  model.path="$assets/model" data.train="$assets/train.jsonl" data.eval="$assets/held_out.jsonl"
  data.batch_size=32 rollout.group_size=16 rollout.max_new_tokens=96 engine.optimizer.learning_rate=2e-5
  rollout.placement=colocated rollout.max_staleness=0 rollout.on_update=drain rollout.gpu_memory_utilization=0.3
  'rollout.engine_arguments={compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}}'
)
read -ra extra <<<"${EXTRA:-}"; read -ra own <<<"${OURS:-}"; read -ra theirs <<<"${TRL:-}"
task+=("${extra[@]}")

run() { # NAME COMMAND...: what it wrote until its end or the limit counts
  local name=$1 start=$SECONDS; shift
  timeout --kill-after=20 "$limit" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit code $?, $((SECONDS - start)) s"
  "$python" "$here/bench/run_figures.py" "$out"/trl[0-9]*/ "$out"/megasync[0-9]*/ --json "$out/peers.json" > "$out/peers.txt" 2>/dev/null
}

one=${CUDA_VISIBLE_DEVICES-0}
export CUDA_VISIBLE_DEVICES=${one%%,*} # of several GPUs TRL would take all
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
for seed in "$@"; do
  rm -rf "$out/trl$seed" "$out/megasync$seed"
  port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])') # TRL takes 29500, whoever has it
  MASTER_PORT=$port PYTHONPATH=$trl_path:$PYTHONPATH run "trl$seed" "$python" "$here/bench/peers/trl_grpo.py" "$here/configs/smollm2.yaml" \
    --to "$out/trl$seed" --steps "$steps" "${theirs[@]}" "${task[@]}" run.seed="$seed"
  run "megasync$seed" "$python" -m megasync.launch.torchrun --nproc-per-node 1 -m megasync.train "$here/configs/smollm2.yaml" \
    "${task[@]}" run.dir="$out" run.name="megasync$seed" run.seed="$seed" run.steps="$steps" rollout.evaluate_every_steps=5 \
    checkpoint.every_steps=0 checkpoint.resume=never "${own[@]}"
done
grep -E "steps|/seconds|tokens|reward" "$out/peers.txt"
