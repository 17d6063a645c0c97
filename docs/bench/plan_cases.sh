#!/usr/bin/env bash
# Trains the cases that `megasync plan` is compared with on one GPU of 80 GB: docs/bench/plan_cases.sh OUT [CASE ...]; no case: all.
# `first` and `second` are the halves of the large ones: about five minutes each, most of it the start of processes. `third`: weights
# in float32, and few tokens of a small model with a large vocabulary, tied. `held-out`: no number was chosen with these in sight.
# Writes OUT/CASE.json and OUT/CASE.log; then `python docs/bench/plan_cases.py OUT` puts the plan beside them.
# `too-large-*` are cases that plan says do not fit: their JSON holds the error that they end with.
set -uo pipefail
out=$1; shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)

train() { # CASE WRAP SEQUENCES TOKENS [key=value ...]: two micro-batches of so many sequences of so many tokens, three steps
  local case=$1 wrap=$2 sequences=$3 tokens=$4 start=$SECONDS; shift 4
  CUDA_VISIBLE_DEVICES=${GPUS:-0} timeout "${LIMIT:-150}" "$python" -m megasync.bench train --config "$here/configs/bench_train.yaml" \
    run.name="plan-$case" run.dir="${RUNS:-/tmp/runs}" bench_train.num_ranks=1 bench_train.steps=2 bench_train.warm_up_steps=1 \
    bench_train.num_microbatches=2 bench_train.num_sequences="$sequences" bench_train.sequence_length="$tokens" \
    "bench_train.variants=[$wrap]" "$@" ${EXTRA:-} --json "$out/$case.json" > "$out/$case.log" 2>&1
  echo "$case: exit code $?, $((SECONDS - start)) s"
}

experts() { # LAYERS: the folder of a config.json with so many layers of 30b-a3b
  local folder=${RUNS:-/tmp/runs}/plan-moe$1
  mkdir -p "$folder"
  (cd "$here" && "$python" -c "
import json, sys
from megasync.hf.model_shape import SHAPES
fields = SHAPES['30b-a3b']._replace(num_hidden_layers=$1).hf_config(32768)
json.dump({**fields, 'torch_dtype': 'bfloat16'}, open('$folder/config.json', 'w'))")
  echo "$folder"
}

first=(ddp-none fsdp-none ddp-selective fsdp-selective ddp-full fsdp-full ddp-mlp ddp-offload ddp-bf16-gradients)
second=(ddp-32k-full lora lora-fsdp-32k lora-7b moe3-ddp moe3-fsdp moe3-selective moe6-lora ddp-no-fusions too-large-ddp too-large-32k)
third=(ddp-float32 fsdp-float32 few-ddp few-fsdp few-fsdp-float32 few-full few-lora)
held_out=(mid-ddp mid-fsdp-selective mid-float32 lora-7b-full)
cases=("$@")
[ $# -gt 0 ] || cases=("${first[@]}" "${second[@]}" "${third[@]}" "${held_out[@]}")
[ "${1:-}" != first ] || cases=("${first[@]}")
[ "${1:-}" != second ] || cases=("${second[@]}")
[ "${1:-}" != third ] || cases=("${third[@]}")
[ "${1:-}" != held-out ] || cases=("${held_out[@]}")
lora=(engine.lora.rank=32 engine.lora.alpha=64)
for case in "${cases[@]}"; do
  case $case in
    ddp-none) train "$case" ddp 2 2048 ;;
    fsdp-none) train "$case" megatron_fsdp 2 2048 ;;
    ddp-selective) train "$case" ddp 4 2048 engine.recompute=selective ;;
    fsdp-selective) train "$case" megatron_fsdp 4 2048 engine.recompute=selective ;;
    ddp-full) train "$case" ddp 4 4096 engine.recompute=full ;;
    fsdp-full) train "$case" megatron_fsdp 2 4096 engine.recompute=full engine.logits_chunk_tokens=2048 ;;
    ddp-mlp) train "$case" ddp 4 2048 engine.recompute=selective 'engine.recompute_modules=[layernorm,mlp]' engine.logits_chunk_tokens=4096 ;;
    ddp-offload) train "$case" ddp 6 2048 engine.optimizer.offload=true ;;
    ddp-bf16-gradients) train "$case" ddp 4 2048 engine.gradient_dtype=bfloat16 engine.recompute=selective ;;
    ddp-32k-full) train "$case" ddp 1 32768 engine.recompute=full engine.logits_chunk_tokens=4096 bench_train.num_microbatches=1 ;;
    lora) train "$case" ddp 4 2048 "${lora[@]}" ;;
    lora-fsdp-32k) train "$case" megatron_fsdp 1 32768 "${lora[@]}" engine.recompute=selective 'engine.recompute_modules=[layernorm,mlp]' \
      engine.logits_chunk_tokens=4096 bench_train.num_microbatches=1 ;;
    lora-7b) train "$case" ddp 2 4096 "${lora[@]}" bench_train.shapes=7b engine.recompute=selective ;;
    moe3-ddp) train "$case" ddp 4 2048 model.path="$(experts 3)" ;;
    moe3-fsdp) train "$case" megatron_fsdp 4 2048 model.path="$(experts 3)" ;;
    moe3-selective) train "$case" ddp 4 4096 model.path="$(experts 3)" engine.recompute=selective ;;
    moe6-lora) train "$case" ddp 4 2048 "${lora[@]}" bench_train.shapes=30b-a3b-6 engine.recompute=selective ;;
    ddp-no-fusions) train "$case" ddp_no_fusions 1 2048 ;;
    ddp-float32) train "$case" ddp 1 1024 model.dtype=float32 ;;
    fsdp-float32) train "$case" megatron_fsdp 1 1024 model.dtype=float32 ;;
    few-ddp) train "$case" ddp 4 64 bench_train.shapes=135m ;;
    few-fsdp) train "$case" megatron_fsdp 4 64 bench_train.shapes=135m ;;
    few-fsdp-float32) train "$case" megatron_fsdp 8 128 bench_train.shapes=135m model.dtype=float32 ;;
    few-full) train "$case" ddp 4 64 bench_train.shapes=135m engine.recompute=full ;;
    few-lora) train "$case" ddp 4 64 bench_train.shapes=135m "${lora[@]}" ;;
    mid-ddp) train "$case" ddp 8 512 bench_train.shapes=135m ;;
    mid-fsdp-selective) train "$case" megatron_fsdp 16 1024 bench_train.shapes=135m engine.recompute=selective ;;
    mid-float32) train "$case" ddp 1 4096 bench_train.shapes=135m model.dtype=float32 ;;
    lora-7b-full) train "$case" ddp 2 2048 "${lora[@]}" bench_train.shapes=7b engine.recompute=full ;;
    too-large-ddp) train "$case" ddp 8 2048 ;;
    too-large-32k) train "$case" ddp 1 32768 engine.recompute=selective engine.logits_chunk_tokens=4096 ;;
    *) echo "no such case: $case" >&2; exit 2 ;;
  esac
done
