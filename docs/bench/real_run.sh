#!/usr/bin/env bash
# A real model learns, seed by seed, on one GPU or two: docs/bench/real_run.sh OUT PART [PART ...]
#   one    trainer and vLLM in turns on one GPU, the seeds side by side: 20 GB of GPU memory and 1.5 to 3 s a step each
#   two    one GPU for the trainer, one for vLLM, the seeds one after another: 0.7 to 2 s a step
# SEEDS="0 1 2", STEPS=150; DATA=/tmp/smollm2-sums, which is made where it is not there: sums of two numbers of one or two digits,
# which SmolLM2-135M-Instruct answers in words and often wrongly. EXTRA="key=value ..." goes to all runs, LIMIT=900 seconds to each.
# Writes OUT/PART-SEED.json, made of the run's own files as it goes: evaluations, each step's figures, seconds, and three responses
# of the evaluation before the first step beside the last one's.
# On a CPU: EXTRA="model.dtype=float32 data.batch_size=2 rollout.group_size=4 engine.tokens_per_microbatch=512 data.eval=
#   rollout.kv_cache_bytes=256MiB rollout.max_num_seqs=8 rollout.placement=separate" STEPS=2 SEEDS=0, part `two`
set -uo pipefail
mkdir -p "$1"
out=$(cd "$1" && pwd); shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3} data=${DATA:-/tmp/smollm2-sums}
cd "$here" || exit 1
[ -d "$data/model" ] || "$python" -m megasync.assets --to "$data" --model smollm2-135m-instruct --task chain_sum \
  --task-options min_terms=2 max_terms=2 max_digits=2 > "$out/assets.log" 2>&1 || { tail -n 5 "$out/assets.log"; exit 1; }
read -ra extra <<<"${EXTRA:-}"
graphs='rollout.engine_arguments={compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}}' # a shorter start
one=(rollout.placement=colocated rollout.max_staleness=0 rollout.on_update=drain rollout.gpu_memory_utilization=0.14
  rollout.kv_cache_bytes=3GiB engine.tokens_per_microbatch=16384 data.batch_size=32)

seed() { # PART SEED [key=value ...]
  local name=$1-$2 start=$SECONDS code; shift
  local seed=$1; shift
  timeout --kill-after=20 "${LIMIT:-900}" "$python" -m megasync.launch.torchrun --nproc-per-node 1 -m megasync.train configs/smollm2.yaml \
    run.name="$name" run.dir="$out/runs" run.seed="$seed" run.steps="${STEPS:-150}" run.log_samples=16 model.path="$data/model" \
    data.train="$data/train.jsonl" data.eval="$data/held_out.jsonl" rollout.max_new_tokens=64 checkpoint.every_steps=0 \
    checkpoint.resume=never rollout.evaluate_every_steps=15 "$graphs" "$@" "${extra[@]}" > "$out/$name.log" 2>&1
  code=$?
  "$python" docs/bench/curve.py "$out/runs/$name" --seconds $((SECONDS - start)) --json "$out/$name.json"
  echo "$name: exit code $code, $((SECONDS - start)) s"
}

for part in "$@"; do
  for number in ${SEEDS:-0 1 2}; do
    case $part in
      one) seed one "$number" "${one[@]}" & sleep 2 ;; # they choose ports
      two) seed two "$number" ;;
      *) echo "no such part: $part" >&2; exit 2 ;;
    esac
  done
  wait
done
