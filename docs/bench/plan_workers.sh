#!/usr/bin/env bash
# GRPO runs that `megasync plan` is compared with: GPU memory of trainer and vLLM's workers, and, of the cases `steps-*`, seconds:
#   docs/bench/plan_workers.sh OUT [CASE ...]; no case: all. GPUS=0,1 says on which GPUs; else they are the first so many as a case
# needs. Cases on other GPUs may run beside each other, started some seconds apart, since they choose ports.
# Random models of several sizes, three steps each, `steps-*` eight; two to three minutes, most of it the start of vLLM. Writes OUT/CASE.json and OUT/CASE.log; then
# `python docs/bench/plan_workers.py OUT` makes the plans again and puts them beside what was measured.
# `held_out`: no number of a worker was chosen with these in sight; `held_out_steps`: nor one of the seconds. On a CPU: EXTRA="model.dtype=float32 rollout.kv_cache_bytes=256MiB" SHAPES=tiny
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE # where torch comes without compiled files each process would compile it anew
mkdir -p "$1"
out=$(cd "$1" && pwd); shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3} models=${MODELS:-/tmp/plan-models}
cd "$here" || exit 1
read -ra extra <<<"${EXTRA:-}"

model() { # SHAPES: a random model of those sizes, and sums to answer
  local shapes=${SHAPES:-$1}
  [ -d "$models/$shapes/model" ] || "$python" docs/bench/plan_workers.py --model "$shapes" --to "$models/$shapes" > "$out/model-$shapes.log" 2>&1
}

grpo() { # CASE SHAPES NUM_GPUS [key=value ...]
  local case=$1 shapes=${SHAPES:-$2} gpus=$3 start=$SECONDS code folder; shift 3
  gpus=${GPUS:-$(seq -s, 0 $((gpus - 1)))} folder=$models/$shapes
  model "$shapes"
  if [ -n "$responses" ]; then # the same weights, with responses and prompts of other lengths
    folder=$models/$shapes-$case
    "$python" docs/bench/plan_workers.py --model "$shapes" --like "$models/$shapes" --to "$folder" --responses "$responses" --prompts "$prompts"
  fi
  CUDA_VISIBLE_DEVICES=$gpus timeout --kill-after=20 "${LIMIT:-300}" "$python" -m megasync.launch.torchrun --nproc-per-node 1 -m megasync.train \
    configs/grpo_gpu.yaml model.path="$folder/model" data.train="$folder/train.jsonl" run.name="$case" run.dir="${RUNS:-/tmp/runs}" \
    run.steps=3 run.loggers=[] data.batch_size=8 engine.tokens_per_microbatch=4096 "$@" "${extra[@]}" > "$out/$case.log" 2>&1
  code=$?
  "$python" docs/bench/plan_workers.py --take "${RUNS:-/tmp/runs}/$case" --shapes "$shapes" --json "$out/$case.json" >> "$out/$case.log" 2>&1
  echo "$case: exit code $code, $((SECONDS - start)) s"
}

steps() { # CASE SHAPES NUM_GPUS RESPONSE_TOKENS PROMPT_TOKENS [key=value ...]: of the tokens means, of responses before they are cut
  local case=$1 shapes=$2 gpus=$3; responses=$4 prompts=$5; shift 5
  grpo "$case" "$shapes" "$gpus" run.steps=8 rollout.max_model_len=4096 rollout.kv_cache_bytes=16GiB engine.tokens_per_microbatch=4096 "$@"
  responses=
}
responses='' prompts=0 # else of `steps`

fitted=(3b-share 3b-eager 3b-colocated 135m-graphs 135m-eager experts-share)
held_out=(7b-lora 7b-colocated 3b-tensor-share 3b-adapter 3b-colocated-share 135m-lora experts-eager 135m-colocated)
fitted_steps=(steps-3b-colocated steps-3b-colocated-eager steps-135m steps-135m-colocated steps-3b-eager steps-7b-lora steps-experts
  steps-3b-stale steps-7b-colocated steps-experts-colocated steps-3b-fsdp-long steps-3b-adapter steps-3b-kl steps-7b-stale)
held_out_steps=(steps-3b-lora-colocated steps-experts-graphs steps-3b-selective)
cases=("$@")
[ $# -gt 0 ] || cases=("${fitted[@]}" "${held_out[@]}" "${fitted_steps[@]}" "${held_out_steps[@]}")
lora=(engine.lora.rank=32 engine.lora.alpha=64)
share=(rollout.kv_cache_bytes=null)
colocated=(rollout.placement=colocated rollout.max_staleness=0)
for case in "${cases[@]}"; do
  case $case in
    models) for shapes in 135m 3b 7b 30b-a3b-3; do model $shapes; done ;;
    model-*) model "${case#model-}" ;;
    3b-share) grpo "$case" 3b 2 "${share[@]}" rollout.gpu_memory_utilization=0.9 ;;
    3b-eager) grpo "$case" 3b 2 rollout.kv_cache_bytes=4GiB rollout.enforce_eager=true ;;
    3b-colocated) grpo "$case" 3b 1 "${colocated[@]}" ;;
    135m-graphs) grpo "$case" 135m 2 rollout.kv_cache_bytes=2GiB ;;
    135m-eager) grpo "$case" 135m 2 rollout.kv_cache_bytes=1GiB rollout.enforce_eager=true rollout.max_num_seqs=64 ;;
    experts-share) grpo "$case" 30b-a3b-3 2 "${share[@]}" rollout.gpu_memory_utilization=0.6 ;;
    3b-colocated-share) grpo "$case" 3b 1 "${colocated[@]}" "${share[@]}" rollout.gpu_memory_utilization=0.3 rollout.enforce_eager=true ;;
    7b-lora) grpo "$case" 7b 2 "${lora[@]}" "${share[@]}" rollout.gpu_memory_utilization=0.5 rollout.enforce_eager=true engine.recompute=full ;;
    7b-colocated) grpo "$case" 7b 1 "${lora[@]}" "${colocated[@]}" rollout.kv_cache_bytes=3GiB rollout.enforce_eager=true engine.recompute=full ;;
    3b-tensor-share) grpo "$case" 3b 3 rollout.tensor_parallel=2 "${share[@]}" rollout.gpu_memory_utilization=0.7 rollout.enforce_eager=true ;;
    3b-adapter) grpo "$case" 3b 2 "${lora[@]}" engine.lora.sync=adapter rollout.max_num_seqs=128 ;;
    135m-lora) grpo "$case" 135m 2 "${lora[@]}" "${share[@]}" rollout.gpu_memory_utilization=0.2 rollout.max_model_len=1024 ;;
    experts-eager) grpo "$case" 30b-a3b-3 2 rollout.kv_cache_bytes=4GiB rollout.enforce_eager=true sync.bucket_bytes=128MiB ;;
    135m-colocated) grpo "$case" 135m 1 "${colocated[@]}" engine.wrap=megatron_fsdp rollout.kv_cache_bytes=3GiB ;;
    steps-3b-colocated) steps "$case" 3b 1 160 0 "${colocated[@]}" data.batch_size=32 rollout.max_new_tokens=256 ;;
    steps-3b-eager) steps "$case" 3b 2 128 0 rollout.max_staleness=0 rollout.enforce_eager=true data.batch_size=16 rollout.max_new_tokens=256 ;;
    steps-7b-lora) steps "$case" 7b 2 128 200 "${lora[@]}" engine.recompute=full rollout.enforce_eager=true data.batch_size=24 rollout.max_new_tokens=256 ;;
    steps-experts) steps "$case" 30b-a3b-3 2 256 0 data.batch_size=32 rollout.max_new_tokens=512 ;;
    steps-135m) steps "$case" 135m 2 256 0 rollout.max_staleness=0 data.batch_size=32 rollout.max_new_tokens=512 ;;
    steps-3b-stale) steps "$case" 3b 2 300 150 rollout.max_staleness=2 data.batch_size=32 rollout.max_new_tokens=512 ;;
    steps-3b-colocated-eager) steps "$case" 3b 1 100 100 "${colocated[@]}" rollout.enforce_eager=true data.batch_size=16 rollout.max_new_tokens=192 ;;
    steps-7b-colocated) steps "$case" 7b 1 200 0 "${lora[@]}" "${colocated[@]}" engine.recompute=full data.batch_size=24 rollout.max_new_tokens=384 ;;
    steps-experts-colocated) steps "$case" 30b-a3b-3 1 200 150 "${colocated[@]}" rollout.enforce_eager=true data.batch_size=48 rollout.max_new_tokens=256 ;;
    steps-135m-colocated) steps "$case" 135m 1 200 150 "${colocated[@]}" engine.wrap=megatron_fsdp data.batch_size=32 rollout.max_new_tokens=384 ;;
    steps-3b-fsdp-long) steps "$case" 3b 1 600 0 "${colocated[@]}" engine.wrap=megatron_fsdp engine.recompute=selective data.batch_size=16 rollout.max_new_tokens=1024 ;;
    steps-3b-adapter) steps "$case" 3b 2 200 100 "${lora[@]}" engine.lora.sync=adapter rollout.max_staleness=1 data.batch_size=24 rollout.max_new_tokens=384 ;;
    steps-3b-kl) steps "$case" 3b 1 128 150 "${colocated[@]}" algorithm.kl_coefficient=0.01 algorithm.num_minibatches=2 data.batch_size=32 rollout.max_new_tokens=256 ;;
    steps-7b-stale) steps "$case" 7b 2 256 0 "${lora[@]}" rollout.max_staleness=4 data.batch_size=16 rollout.max_new_tokens=512 ;;
    steps-3b-lora-colocated) steps "$case" 3b 1 300 100 "${lora[@]}" "${colocated[@]}" data.batch_size=24 rollout.max_new_tokens=512 ;;
    steps-experts-graphs) steps "$case" 30b-a3b-3 1 256 0 "${colocated[@]}" engine.recompute=full data.batch_size=24 rollout.max_new_tokens=512 ;;
    steps-3b-selective) steps "$case" 3b 1 350 200 "${colocated[@]}" engine.recompute=selective data.batch_size=12 rollout.max_new_tokens=512 ;;
    *) echo "no such case: $case" >&2; exit 2 ;;
  esac
done
