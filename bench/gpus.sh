#!/usr/bin/env bash
# Takes the figures of docs/benchmarks.md that need GPUs: bench/gpus.sh OUT CASE [CASE ...]; a case says on which GPUs it runs.
# Cases on other GPUs may run beside each other; GPUS=0 puts a case elsewhere, RANKS=1 gives a GRPO run so many trainer ranks,
# EXTRA="key=value ..." goes to all. Writes OUT/CASE.json and OUT/CASE.log; a failed case leaves its log, and the exit code is 1.
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE # where torch comes without compiled files each process would compile it again
out=$1; shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3} failed=0

end() { # CASE EXIT_CODE PATTERN: what matters of its log
  echo "$1: exit code $2"
  [ "$2" = 0 ] || failed=1
  if [ "$2" = 0 ]; then grep -E "$3" "$out/$1.log" | tail -40; else grep -E "$3|Error" "$out/$1.log" | tail -5; tail -25 "$out/$1.log"; fi
}

sync() { # CASE GPUS [key=value ...]
  local case=$1 gpus=${GPUS:-$2}; shift 2
  CUDA_VISIBLE_DEVICES=$gpus timeout "${LIMIT:-600}" "$python" -m bench sync --config "$here/configs/bench_gpu.yaml" \
    run.name="$case" run.dir=/tmp/runs "$@" ${EXTRA:-} --json "$out/$case.json" > "$out/$case.log" 2>&1
  end "$case" $? "│"
}

grpo() { # CASE GPUS RANKS [key=value ...]
  local case=$1 gpus=${GPUS:-$2} ranks=${RANKS:-$3}; shift 3
  CUDA_VISIBLE_DEVICES=$gpus timeout "${LIMIT:-900}" "$python" -m megasync.launch.torchrun --nproc-per-node "$ranks" \
    -m megasync.train "$here/configs/grpo_gpu.yaml" model.path=/tmp/assets/model data.train=/tmp/assets/train.jsonl \
    run.name="$case" run.dir=/tmp/runs "$@" ${EXTRA:-} > "$out/$case.log" 2>&1
  end "$case" $? "^step"
  "$python" "$here/bench/run_figures.py" "/tmp/runs/$case" --json "$out/$case.json"
  cp "/tmp/runs/$case/timeline.json" "$out/$case.timeline.json"
}

rollout() { # CASE GPUS [key=value ...]
  local case=$1 gpus=${GPUS:-$2}; shift 2
  CUDA_VISIBLE_DEVICES=$gpus timeout "${LIMIT:-600}" "$python" -m bench rollout --config "$here/configs/bench_gpu.yaml" \
    run.name="$case" run.dir=/tmp/runs bench.lora_rank=0 "$@" ${EXTRA:-} --json "$out/$case.json" > "$out/$case.log" 2>&1
  end "$case" $? "│|speed|tokens/s"
}

train() { # CASE GPUS [key=value ...]
  local case=$1 gpus=${GPUS:-$2}; shift 2
  CUDA_VISIBLE_DEVICES=$gpus timeout "${LIMIT:-600}" "$python" -m bench train --config "$here/configs/bench_train.yaml" \
    run.name="$case" run.dir=/tmp/runs "$@" ${EXTRA:-} --json "$out/$case.json" > "$out/$case.log" 2>&1
  end "$case" $? "│"
}

dtype_rollout() { # SHAPES TOKENS DTYPE: 128 samples of so many tokens in bf16, or in FP8
  local dtype=${3/bf16/model}
  rollout "$1-rollout-$3" 0 bench.shapes="$1" rollout.dtype="$dtype" bench.num_prompts=128 bench.prompt_tokens=64 bench.rounds=3 \
    rollout.max_new_tokens="$2" rollout.max_model_len=$((64 + $2)) rollout.max_num_seqs=128 rollout.kv_cache_bytes=8GiB \
    rollout.enforce_eager=false rollout.gpu_memory_utilization=0.48
}

model_rollout() { # TOKENS: 1024 samples of so many tokens by the model in the folder $MODEL
  rollout "model-rollout-$1" 0 model.path="${MODEL:?the folder of a Hugging Face model}" bench.num_prompts=1024 bench.prompt_tokens=64 \
    bench.rounds=5 rollout.max_new_tokens="$1" rollout.max_num_seqs=1024 rollout.kv_cache_bytes=24GiB \
    rollout.enforce_eager=false rollout.gpu_memory_utilization=0.4
}

assets() {
  [ -d /tmp/assets ] || CUDA_VISIBLE_DEVICES=${GPUS:-0} "$python" -m megasync assets --to /tmp/assets --shapes 3b --mean-response-tokens 64 2>&1 | tail -1
}

moe_assets() { # six layers of 30b-a3b
  [ -d /tmp/assets-moe ] || CUDA_VISIBLE_DEVICES=${GPUS:-0} "$python" -m megasync assets --to /tmp/assets-moe --shapes 30b-a3b-6 \
    --mean-response-tokens 64 2>&1 | tail -1
}

long_assets() { # responses of 500 tokens on average
  [ -d /tmp/assets-500 ] || CUDA_VISIBLE_DEVICES=${GPUS:-0} "$python" -m megasync assets --to /tmp/assets-500 --shapes 3b \
    --mean-response-tokens 500 2>&1 | tail -1
}

grpo_stream() { # CASE [key=value ...]: 256 samples a step, 2048 new tokens at most
  local case=$1; shift
  long_assets
  grpo "$case" 0,1 1 model.path=/tmp/assets-500/model data.train=/tmp/assets-500/train.jsonl rollout.on_update=continue \
    rollout.max_new_tokens=2048 rollout.max_model_len=2304 rollout.kv_cache_bytes=24GiB "$@"
}

moe_grpo=(
  model.path=/tmp/assets-moe/model data.train=/tmp/assets-moe/train.jsonl run.steps=20 engine.parallel.expert=2
  rollout.placement=colocated rollout.max_staleness=0 rollout.replicas=2
)
moe6=(bench_train.shapes=30b-a3b-6 bench_train.num_microbatches=1 bench_train.sequence_length=4096) # 4 x 4096 tokens a rank
# one packed sequence a rank
long=(bench_train.sequence_length=32768 bench_train.num_sequences=1 bench_train.num_microbatches=1
  engine.logits_chunk_tokens=4096)
cp2=(bench_train.num_ranks=2 bench_train.sequence_length=131072 engine.parallel.context=2
  engine.recompute=selective 'engine.recompute_modules=[layernorm,mlp]')

mkdir -p "$out"
for case in "$@"; do
  case $case in
    3b) sync 3b 0,1 ;;
    3b-ipc-256) sync 3b-ipc-256 3 rollout.placement=colocated bench.lora_rank=0 sync.bucket_bytes=256MiB ;;
    3b-ipc) sync 3b-ipc 3 rollout.placement=colocated bench.lora_rank=0 ;;
    3b-ipc-2) sync 3b-ipc-2 0,1 rollout.placement=colocated bench.num_ranks=2 rollout.replicas=2 bench.lora_rank=0 ;;
    3b-ipc-fsdp)
      sync 3b-ipc-fsdp 0,1 rollout.placement=colocated bench.num_ranks=2 rollout.replicas=2 engine.wrap=megatron_fsdp bench.update=step \
        bench.lora_rank=0 ;;
    7b) sync 7b 0,1 bench.shapes=7b bench.lora_rank=0 ;;
    moe6-lora) # LoRA of experts, merged, colocated
      sync moe6-lora 0 bench.shapes=30b-a3b-6 bench.lora_rank=16 'bench.methods=[lora merged]' rollout.placement=colocated ;;
    30b-a3b) sync 30b-a3b 0,1 bench.shapes=30b-a3b bench.lora_rank=0 rollout.gpu_memory_utilization=0.9 'bench.methods=[stream,floor,unverified,mbridge packed]' ;;
    30b-a3b-ep2)
      sync 30b-a3b-ep2 0,1,2 bench.shapes=30b-a3b engine.parallel.expert=2 bench.num_ranks=2 bench.lora_rank=0 \
        rollout.gpu_memory_utilization=0.9 'bench.methods=[stream,floor,unverified]' ;;
    30b-a3b-ep2-tp2)
      sync 30b-a3b-ep2-tp2 0,1,2,3 bench.shapes=30b-a3b engine.parallel.expert=2 bench.num_ranks=2 bench.lora_rank=0 \
        rollout.tensor_parallel=2 rollout.gpu_memory_utilization=0.9 'bench.methods=[stream,floor,unverified]' ;;
    3b-fsdp) sync 3b-fsdp 0,1,2 engine.wrap=megatron_fsdp bench.num_ranks=2 bench.update=step bench.lora_rank=0 ;;
    3b-tp2-tp1) sync 3b-tp2-tp1 0,1,2 engine.parallel.tensor=2 bench.num_ranks=2 bench.lora_rank=0 ;;
    3b-tp1-tp2) sync 3b-tp1-tp2 0,1,2 rollout.tensor_parallel=2 bench.lora_rank=0 ;;
    3b-fsdp-2) sync 3b-fsdp-2 0,1,2,3 engine.wrap=megatron_fsdp bench.num_ranks=2 rollout.replicas=2 bench.update=step bench.lora_rank=0 ;;
    3b-rollout)
      rollout 3b-rollout 0 bench.num_prompts=256 bench.prompt_tokens=64 bench.median_tokens=430 bench.rounds=5 \
        rollout.max_new_tokens=2048 rollout.max_model_len=2560 rollout.max_num_seqs=256 rollout.kv_cache_bytes=24GiB \
        rollout.enforce_eager=false rollout.gpu_memory_utilization=0.4 ;;
    7b-rollout-bf16) dtype_rollout 7b 1024 bf16 ;;
    7b-rollout-fp8) dtype_rollout 7b 1024 fp8 ;;
    30b-a3b-rollout-bf16) dtype_rollout 30b-a3b 512 bf16 ;;
    30b-a3b-rollout-fp8) dtype_rollout 30b-a3b 512 fp8 ;;
    model-rollout-16) model_rollout 16 ;;
    model-rollout-45) model_rollout 45 ;;
    train-ddp) train train-ddp 0,1 ;;
    train-fsdp) train train-fsdp 0,1 engine.wrap=megatron_fsdp ;;
    train-ddp-plain) train train-ddp-plain 0,1 engine.fusions=none ;;
    train-torch) train train-torch 0 bench_train.num_ranks=1 engine.kernels=torch ;; # what other libraries' kernels bring, where installed
    3b-32k) train 3b-32k 0 "${long[@]}" bench_train.num_ranks=1 engine.recompute=selective ;;
    3b-32k-torch) train 3b-32k-torch 0 "${long[@]}" bench_train.num_ranks=1 engine.recompute=selective engine.kernels=torch ;;
    3b-32k-full) train 3b-32k-full 0 "${long[@]}" bench_train.num_ranks=1 engine.recompute=full ;;
    3b-131k-cp2) train 3b-131k-cp2 0,1 "${long[@]}" "${cp2[@]}" engine.parallel.context_attention=ulysses ;;
    3b-131k-cp2-allgather) train 3b-131k-cp2-allgather 0,1 "${long[@]}" "${cp2[@]}" ;;
    moe6) train moe6 0 "${moe6[@]}" bench_train.num_ranks=1 ;;
    moe6-torch) train moe6-torch 0 "${moe6[@]}" bench_train.num_ranks=1 engine.kernels=torch ;;
    moe6-ep2) train moe6-ep2 0,1 "${moe6[@]}" engine.parallel.expert=2 engine.wrap=megatron_fsdp ;;
    assets) assets ;;
    moe-grpo-ep2) moe_assets; grpo moe-grpo-ep2 0,1 2 "${moe_grpo[@]}" ;;
    moe-grpo-ep2-replay)
      moe_assets
      grpo moe-grpo-ep2-replay 0,1 2 "${moe_grpo[@]}" algorithm.router_replay=rollout algorithm.log_router_gap=true ;;
    grpo) assets; grpo grpo 0,1 1 ;;
    grpo-colocated) assets; grpo grpo-colocated 2,3 2 rollout.placement=colocated rollout.max_staleness=0 rollout.replicas=2 ;;
    grpo-stream-4) grpo_stream grpo-stream-4 rollout.max_staleness=4 run.steps=40 ;;
    grpo-stream-1) grpo_stream grpo-stream-1 rollout.max_staleness=1 run.steps=20 ;;
    *) echo "no such case: $case" >&2; exit 2 ;;
  esac
done
exit $failed
