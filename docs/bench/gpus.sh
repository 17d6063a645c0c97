#!/usr/bin/env bash
# Takes the figures of docs/benchmarks.md that need GPUs: docs/bench/gpus.sh OUT CASE [CASE ...]; a case says on which GPUs it runs.
# Cases on other GPUs may run beside each other; GPUS=0 puts a case elsewhere,
# EXTRA="key=value ..." goes to all. Writes OUT/CASE.json and OUT/CASE.log; a failed case leaves its log.
set -uo pipefail
out=$1; shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}

sync() { # CASE GPUS [key=value ...]
  local case=$1 gpus=${GPUS:-$2}; shift 2
  CUDA_VISIBLE_DEVICES=$gpus timeout "${LIMIT:-240}" "$python" -m megasync.bench sync --config "$here/configs/bench_gpu.yaml" \
    run.name="$case" run.dir=/tmp/runs "$@" ${EXTRA:-} --json "$out/$case.json" > "$out/$case.log" 2>&1
  echo "$case: exit code $?"; grep -E "│|aimed at|Error" "$out/$case.log" | tail -40
}

grpo() { # CASE GPUS [key=value ...]
  local case=$1 gpus=${GPUS:-$2}; shift 2
  nvidia-smi -i "$gpus" --query-gpu=timestamp,index,memory.used --format=csv,noheader,nounits -l 5 > "$out/$case.memory.csv" 2>&1 &
  local watch=$!
  CUDA_VISIBLE_DEVICES=$gpus timeout "${LIMIT:-300}" "$python" -m torch.distributed.run --standalone --nproc-per-node 1 \
    -m megasync.train "$here/configs/grpo_gpu.yaml" model.path=/tmp/assets/model data.train=/tmp/assets/train.jsonl \
    run.name="$case" run.dir=/tmp/runs "$@" > "$out/$case.log" 2>&1
  echo "$case: exit code $?"; kill $watch
  cp /tmp/runs/"$case"/{metrics.jsonl,timeline.json,summary.json,report.html} "$out/" 2>/dev/null
  for file in metrics.jsonl timeline.json summary.json report.html; do mv "$out/$file" "$out/$case.$file" 2>/dev/null; done
  grep -E "^step|Error" "$out/$case.log" | tail -12
}

assets() {
  [ -d /tmp/assets ] || CUDA_VISIBLE_DEVICES=${GPUS:-$1} "$python" -m megasync.assets --to /tmp/assets --shapes 3b --mean-response-tokens 64 2>&1 | tail -1
}

mkdir -p "$out"
for case in "$@"; do
  case $case in
    3b) sync 3b 0,1,2 ;;
    3b-ipc-256) sync 3b-ipc-256 3 rollout.placement=colocated bench.lora_rank=0 sync.bucket_bytes=256MiB ;;
    3b-ipc) sync 3b-ipc 3 rollout.placement=colocated bench.lora_rank=0 ;;
    7b) sync 7b 0,1 bench.shapes=7b bench.lora_rank=0 ;;
    3b-fsdp) sync 3b-fsdp 0,1,2 engine.wrap=megatron_fsdp bench.num_ranks=2 bench.update=step bench.lora_rank=0 ;;
    3b-tp2-tp1) sync 3b-tp2-tp1 0,1,2 engine.parallel.tensor=2 bench.num_ranks=2 bench.lora_rank=0 ;;
    3b-tp1-tp2) sync 3b-tp1-tp2 0,1,2 rollout.tensor_parallel=2 bench.lora_rank=0 ;;
    grpo) assets 2; grpo grpo 2,3 ;;
    grpo-colocated) assets 3; grpo grpo-colocated 3 rollout.placement=colocated rollout.max_staleness=0 ;;
    *) echo "no such case: $case" >&2; exit 2 ;;
  esac
done
