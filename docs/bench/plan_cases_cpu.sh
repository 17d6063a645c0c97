#!/usr/bin/env bash
# Runs that `megasync plan` is compared with on two CPU cores: docs/bench/plan_cases_cpu.sh OUT SMOLLM2 [CASE ...]; no case: all.
# SMOLLM2 is the folder of `megasync assets --model smollm2-135m-instruct --task chain_sum --task-options max_terms=4 max_digits=2`.
# Each run writes its plan right before its first step, and ends with the table of what was planned and what came of it; then the plan
# is made once more, as the machine is now and with the lengths of responses that there were. Both are in OUT/CASE.txt too.
# The cores have to be quiet. Not among all, since no number of the seconds was chosen with them in sight, but gloo's: smol-ddp-2, smol-lora-bf16,
# smol-fsdp-8, smol-lora-2, tiny-moe, quickstart-rl-stale; nor, since, smol-recompute-2. Of smol-rl-* what a plan counts was
# chosen with the runs in sight.
set -uo pipefail
out=$1; smollm2=$2; shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
smollm2=$(cd "$smollm2" && pwd)
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 TOKENIZERS_PARALLELISM=false VLLM_CPU_OMP_THREADS_BIND=nobind CUDA_VISIBLE_DEVICES=

train() { # CASE RANKS CONFIG [key=value ...]
  local case=$1 ranks=$2 config=$3 start=$SECONDS; shift 3
  (cd "$here" && timeout "${LIMIT:-560}" "$python" -m megasync train "configs/$config" run.name="$case" run.dir="$out" run.loggers=[] \
    checkpoint.every_steps=0 checkpoint.resume=never "$@" --nproc "$ranks") > "$out/$case.log" 2>&1
  echo "$case: exit code $?, $((SECONDS - start)) s"
  (cd "$here" && "$python" -m megasync plan --compare "$out/$case") | tee "$out/$case.txt"
  (cd "$here" && GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4194304 PYTHONPATH="$here" \
    "$python" docs/bench/plan_cpu_again.py "$out/$case" --lengths 2> /dev/null) | tee -a "$out/$case.txt"
}

smol() { # CASE RANKS [key=value ...]: supervised steps of a real model
  local case=$1 ranks=$2; shift 2
  train "$case" "$ranks" smollm2.yaml algorithm.name=sft model.path="$smollm2/model" data.train="$smollm2/train.jsonl" 'data.eval=""' \
    model.dtype=float32 engine.wrap=ddp run.steps=8 data.batch_size=16 "$@"
}

rl() { # CASE [key=value ...]: GRPO of a real model, training and generation in turns
  local case=$1; shift
  train "$case" 1 smollm2.yaml model.path="$smollm2/model" data.train="$smollm2/train.jsonl" 'data.eval=""' model.dtype=float32 \
    rollout.evaluate_at_start=false rollout.max_staleness=0 rollout.on_update=drain rollout.kv_cache_bytes=256MiB run.steps=6 data.batch_size=4 \
    rollout.group_size=4 rollout.max_new_tokens=24 rollout.max_num_seqs=32 "$@"
}

assets() { # the quickstart's model and sums
  [ -d "$out/assets" ] || (cd "$here" && "$python" -m megasync.assets --to "$out/assets" --dtype float32 > "$out/assets.log" 2>&1)
}

tiny() { # CASE RANKS [key=value ...]: supervised steps of the quickstart's model
  local case=$1 ranks=$2; shift 2
  assets
  train "$case" "$ranks" quickstart_sft.yaml model.path="$out/assets/model" data.train="$out/assets/train.jsonl" 'data.eval=""' \
    run.steps=12 run.stop_at_accuracy=0 run.export_hf=false "$@"
}

cases=("$@")
[ $# -gt 0 ] || cases=(tiny-ddp tiny-fsdp-2 quickstart-rl smol smol-lora smol-recompute smol-selective smol-bf16 smol-2 smol-rl)
for case in "${cases[@]}"; do
  case $case in
    tiny-ddp) tiny "$case" 1 engine.wrap=ddp ;;
    tiny-fsdp-2) tiny "$case" 2 ;;
    quickstart-rl) assets; train "$case" 2 quickstart.yaml model.path="$out/assets/model" data.train="$out/assets/train.jsonl" \
      'data.eval=""' rollout.evaluate_at_start=false run.steps=12 ;;
    smol) smol "$case" 1 ;;
    smol-lora) smol "$case" 1 engine.lora.rank=8 ;;
    smol-recompute) smol "$case" 1 engine.recompute=full data.batch_size=32 run.steps=6 ;;
    smol-selective) smol "$case" 1 engine.recompute=selective ;;
    smol-bf16) smol "$case" 1 model.dtype=bfloat16 engine.wrap=megatron_fsdp data.batch_size=2 ;;
    smol-2) smol "$case" 2 engine.wrap=megatron_fsdp ;;
    smol-rl) rl "$case" ;;
    smol-rl-lora) rl "$case" engine.lora.rank=8 data.batch_size=6 ;;
    smol-rl-long) rl "$case" engine.wrap=ddp rollout.max_new_tokens=64 data.batch_size=3 ;;
    smol-rl-bf16) rl "$case" model.dtype=bfloat16 rollout.max_new_tokens=40 data.batch_size=7 ;;
    smol-rl-stale) rl "$case" rollout.max_staleness=1 rollout.on_update=continue rollout.max_new_tokens=32 ;;
    smol-recompute-2) smol "$case" 2 engine.wrap=megatron_fsdp engine.recompute=full run.steps=6 data.batch_size=24 ;;
    smol-ddp-2) smol "$case" 2 ;;
    smol-lora-bf16) smol "$case" 1 engine.lora.rank=16 model.dtype=bfloat16 data.batch_size=8 ;;
    smol-fsdp-8) smol "$case" 1 engine.wrap=megatron_fsdp data.batch_size=8 ;;
    smol-lora-2) smol "$case" 2 engine.lora.rank=8 engine.wrap=megatron_fsdp data.batch_size=32 run.steps=6 ;;
    tiny-moe)
      [ -d "$out/moe" ] || (cd "$here" && "$python" -m megasync.assets --to "$out/moe" --shapes tiny-moe --dtype float32 > "$out/moe.log" 2>&1)
      train "$case" 1 quickstart_sft.yaml model.path="$out/moe/model" data.train="$out/moe/train.jsonl" 'data.eval=""' run.steps=12 \
        run.stop_at_accuracy=0 run.export_hf=false engine.wrap=ddp ;;
    quickstart-rl-stale) assets; train "$case" 1 quickstart.yaml model.path="$out/assets/model" data.train="$out/assets/train.jsonl" \
      'data.eval=""' rollout.evaluate_at_start=false run.steps=12 rollout.max_staleness=1 rollout.on_update=continue ;;
    *) echo "no such case: $case" >&2; exit 2 ;;
  esac
done
