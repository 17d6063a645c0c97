#!/usr/bin/env bash
# Episodes on one GPU, with SmolLM2-135M-Instruct: docs/bench/agents.sh OUT [curve] [speed]; no case: both, one after the other.
#   curve  configs/agents_smollm2.yaml, trainer and vLLM in turns on the GPU, once for each of SEEDS ("0 1 2"), side by side
#          (SIDE_BY_SIDE=0: one after another), STEPS (100) each: OUT/agents-SEED.json with every step, the evaluations and three responses
#   speed  python -m megasync.bench episodes --config configs/bench_episodes.yaml: OUT/agents-speed.json, also of the rows before a limit;
#          vLLM compiles, since with turns that begin at any moment most steps hold a prefill, and only then are those captured too
# ASSETS (/tmp/smollm2) has the folder `model`; GPUS=0 says where; LIMIT seconds for each seed (560) and for speed (540); CURVE and
# SPEED="key=value ..." go to the two. About 24 GB of GPU memory a seed (12 of them vLLM's), 48 GB for speed.
# On a CPU: CURVE="model.dtype=float32 data.batch_size=2 rollout.group_size=4 engine.tokens_per_microbatch=512 data.eval=
#   rollout.kv_cache_bytes=256MiB rollout.max_num_seqs=16" STEPS=2 SEEDS=0, SPEED="model.dtype=float32 bench.num_prompts=16
#   bench.turns=3 bench.slots=[8] rollout.max_new_tokens=16 rollout.max_num_seqs=8 rollout.kv_cache_bytes=256MiB"
set -uo pipefail
mkdir -p "$1"
out=$(realpath "$1"); shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3} runs=${RUNS:-/tmp/runs} assets=${ASSETS:-/tmp/smollm2}
export CUDA_VISIBLE_DEVICES=${GPUS:-0}
graphs='rollout.engine_arguments={compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}}'

seed() { # SEED: one run
  local name=agents-$1 start=$SECONDS
  # shellcheck disable=SC2086 # several overrides
  timeout -k 20 "${LIMIT:-560}" "$python" -m megasync.launch.torchrun --nproc-per-node 1 -m megasync.train \
    "$here/configs/agents_smollm2.yaml" run.name="$name" run.dir="$runs" run.seed="$1" run.steps="${STEPS:-100}" \
    model.path="$assets/model" data.train="$runs/agents-data/products.jsonl" data.eval="$runs/agents-data/products_held_out.jsonl" \
    rollout.placement=colocated rollout.max_staleness=0 rollout.on_update=drain rollout.kv_cache_bytes=4GiB \
    rollout.gpu_memory_utilization=0.15 engine.tokens_per_microbatch=16384 checkpoint.every_steps=0 checkpoint.resume=never \
    run.log_samples=16 "$graphs" ${CURVE:-} \
    > "$out/$name.log" 2>&1
  echo "$name: exit code $?, $((SECONDS - start)) s"
  "$python" "$here/docs/bench/curve.py" "$runs/$name" --seconds $((SECONDS - start)) --json "$out/$name.json"
}

curve() {
  (cd "$here" && "$python" -m megasync.examples.smollm2_calculator --to "$runs/agents-data") || return
  local each pids=()
  for each in ${SEEDS:-0 1 2}; do
    if [ "${SIDE_BY_SIDE:-1}" = 1 ]; then
      seed "$each" & pids+=($!)
      sleep 3 # they choose ports
    else
      seed "$each"
    fi
  done
  wait "${pids[@]}"
}

speed() {
  local start=$SECONDS
  # shellcheck disable=SC2086
  timeout -k 20 "${LIMIT:-540}" "$python" -m megasync.bench episodes --config "$here/configs/bench_episodes.yaml" \
    run.name=agents-speed run.dir="$runs" model.path="$assets/model" ${SPEED:-} \
    --json "$out/agents-speed.json" > "$out/agents-speed.log" 2>&1
  echo "agents-speed: exit code $?, $((SECONDS - start)) s"
  cp "$runs/agents-speed/bench_episodes.json" "$out/agents-speed.rows.json" 2> /dev/null
  grep -E "│|aimed at|^round" "$out/agents-speed.log"
}

[ $# -gt 0 ] || set -- curve speed
for case in "$@"; do
  case $case in
    curve) curve ;;
    speed) speed ;;
    *) echo "no such case: $case" >&2; exit 2 ;;
  esac
done
