#!/usr/bin/env bash
# Takes the figures of docs/exact.md and docs/bisect.md on a Hopper GPU: docs/bench/exact.sh OUT PART [PART ...]
# Parts run one after another on the GPUs in CUDA_VISIBLE_DEVICES, each with a limit of its own; what fails leaves its log. Writes
# OUT/PART.json as it goes, and runs under OUT/runs. Seconds, and GPU memory at most, on one H100 with a cold vLLM:
#   ladder         GRPO of SmolLM2 with answers of 500 tokens, bfloat16 and exact; alone on its GPU: 350 s, 30 GB
#   ladder-head    the same with a float32 head: 200 s
#   ladder-float16 the same in float16: 190 s
#   ladder-default bfloat16 as vLLM starts by itself, with torch.compile: 220 s
#   ladder-3b-bfloat16, ladder-3b-head, ladder-3b-float16, ladder-3b-exact: on random weights of a 3 B model, 20 steps; alone on its GPU:
#                  300 s, 75 GB each; `assets-3b` makes them
#   exact-eager    exact without CUDA graphs, where `ladder` fails with them: 200 s
#   deterministic  two runs of 30 steps, one after the other, and what of them is equal: 260 s, 25 GB, bears others beside it
#   bisect         both sides of SmolLM2, bfloat16 and exact, from the runs of `ladder`: 150 s, 15 GB
#   bisect-3b      of the 3 B model, as a run of `ladder-3b-bfloat16` starts from it, TIMES=2 times: 50 s each, 35 GB
#   delta          100 steps of SmolLM2 on sums, its versions in a log, each made again: 400 s, 25 GB, bears others beside it
#   delta-link     the same on two GPUs by sync.transport=delta; the replica is killed at step 80 and comes back by the log: 400 s
#   delta-layouts  6 steps of SmolLM2 with LoRA, and on two GPUs under Megatron-FSDP, gone on with by a second start, and in two stages: 300 s
#   delta-3b       steps of the 3 B model with its versions in a log, DELTA_STEPS=100 of them: 640 s, 75 GB, 35 GB of the disk
#   delta-3b-figures  each of them made again, on the CPU: 300 to 600 s
#   tests          tests that need a GPU: 120 s, 10 GB
#   seeds          three seeds on sums, with and without exact, in turns: 300 s each; SEEDS="0 1 2", EXACT="false true"
# KILL_AT=80 is another step for delta-link. MODEL_DATA=FOLDER is where `megasync assets --model smollm2-135m-instruct` wrote; STEPS=20, EXTRA="key=value ..." goes to all runs.
set -uo pipefail
unset PYTHONDONTWRITEBYTECODE # where torch comes without compiled files each process would compile it anew
out=$1; shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
data=${MODEL_DATA:-/tmp/smollm2}
large=${LARGE_DATA:-/tmp/assets-3b}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH="$here:$here/docs/bench${PYTHONPATH:+:$PYTHONPATH}"
read -ra extra <<<"${EXTRA:-}"
large_sizes=(
  model.path="$large/model" data.train="$large/train.jsonl" engine.wrap=ddp engine.recompute=selective engine.tokens_per_microbatch=4096
  engine.logits_chunk_tokens=2048 'rollout.offload_trainer=[optimizer]' data.batch_size=8 rollout.group_size=8 rollout.max_model_len=640
  rollout.max_num_seqs=64 rollout.kv_cache_bytes=2GiB rollout.gpu_memory_utilization=0.15
)
uncompiled='rollout.engine_arguments={compilation_config: {mode: 0, cudagraph_mode: FULL_DECODE_ONLY}}'
colocated=(rollout.placement=colocated rollout.max_staleness=0 rollout.on_update=drain)
smollm2=(model.path="$data/model" engine.wrap=ddp rollout.max_new_tokens=96)

limit() { # NAME SECONDS COMMAND...: its output in OUT/NAME.log, its exit code and seconds told
  local name=$1 seconds=$2 begin=$SECONDS code; shift 2
  timeout --kill-after=20 "$seconds" "$@" > "$out/$name.log" 2>&1; code=$?
  echo "$name: exit code $code, $((SECONDS - begin)) s"
  [ "$code" = 0 ] || tail -n 15 "$out/$name.log"
  return "$code"
}

ladder() { # NAME SECONDS RUNGS CONFIG [key=value ...]
  local name=$1 seconds=$2 rungs=$3 config=$4; shift 4
  limit "$name" "$seconds" "$python" "$here/docs/bench/ladder.py" --to "$out/runs/${LADDER:-ladder}" --config "$here/configs/$config" \
    --steps "${STEPS:-20}" --rungs "$rungs" --json "$out/$name.json" "${colocated[@]}" "$@" "${extra[@]}"
  grep '^|' "$out/$name.log"
}

stories() { # NAME SECONDS RUNGS [key=value ...]: 16 prompts of 16 answers of up to 500 tokens
  local name=$1 seconds=$2 rungs=$3; shift 3
  "$python" "$here/docs/bench/stories.py" "$out/stories.jsonl" || return
  ladder "$name" "$seconds" "$rungs" smollm2.yaml "${smollm2[@]}" data.train="$out/stories.jsonl" data.system_prompt= \
    rollout.reward=stories:variety data.batch_size=16 rollout.group_size=16 rollout.max_new_tokens=500 rollout.max_model_len=640 \
    rollout.max_num_seqs=256 rollout.kv_cache_bytes=6GiB rollout.gpu_memory_utilization=0.2 "$@"
}

large() { # NAME SECONDS RUNGS [key=value ...]: 8 prompts of 8 answers
  local name=$1 seconds=$2 rungs=$3; shift 3
  large_data || return
  ladder "$name" "$seconds" "$rungs" grpo_gpu.yaml "${large_sizes[@]}" run.log_samples=0 rollout.max_new_tokens=500 "$@"
}

large_data() {
  [ -d "$large/model" ] || "$python" -m megasync.assets --to "$large" --shapes 3b --dtype bfloat16 --mean-response-tokens 2000 > "$out/assets-3b.log" 2>&1
}

train() { # NAME SECONDS RANKS [key=value ...]: SmolLM2 on sums
  local name=$1 seconds=$2 ranks=$3; shift 3
  limit "$name" "$seconds" "$python" -m megasync.launch.torchrun --nproc-per-node "$ranks" -m megasync.train "$here/configs/smollm2.yaml" \
    run.name="$name" run.dir="$out/runs" "${smollm2[@]}" data.train="$data/train.jsonl" data.eval="$data/held_out.jsonl" "$@" "${extra[@]}"
  local code=$?
  [ ! -f "$out/runs/$name/metrics.jsonl" ] || cp "$out/runs/$name/metrics.jsonl" "$out/$name.metrics.jsonl"
  [ ! -f "$out/runs/$name/evaluations.jsonl" ] || cp "$out/runs/$name/evaluations.jsonl" "$out/$name.evaluations.jsonl"
  return "$code"
}

beside=("${colocated[@]}" rollout.gpu_memory_utilization=0.12 rollout.kv_cache_bytes=8GiB engine.tokens_per_microbatch=8192)
unseen=(rollout.evaluate_at_start=false rollout.evaluate_every_steps=0 checkpoint.every_steps=0 data.eval=)

deterministic() {
  local run
  for run in deterministic-1 deterministic-2; do
    train "$run" 200 1 "${beside[@]}" "${unseen[@]}" data.eval= run.deterministic=true run.steps="${STEPS:-30}" data.batch_size=16 \
      rollout.group_size=8 rollout.max_num_seqs=128 "$uncompiled" || return
  done
  limit deterministic 60 "$python" "$here/docs/bench/same_metrics.py" "$out/runs/deterministic-1" "$out/runs/deterministic-2" --json "$out/deterministic.json"
  grep equal "$out/deterministic.log"
}

bisect() { # NAME RUN [key=value ...]
  local name=$1 run=$2 begin=$SECONDS; shift 2
  if timeout --kill-after=20 200 "$python" -m megasync bisect "$run" --step 0 rollout.max_new_tokens=64 "$@" "${extra[@]}" --json \
    > "$out/$name.json" 2> "$out/$name.log"; then echo "$name: nothing but rounding"; else echo "$name: exit code $?"; tail -n 15 "$out/$name.log"; fi
  echo "$((SECONDS - begin))" | tee "$out/$name.seconds"
}

delta() { # NAME RANKS [key=value ...]
  local name=$1 ranks=$2; shift 2
  train "$name" 520 "$ranks" "${unseen[@]}" data.eval= sync.log=deltas run.steps="${STEPS:-100}" "$uncompiled" "$@"
  limit "$name-figures" 400 "$python" "$here/docs/bench/version_figures.py" "$out/runs/$name" --json "$out/$name.json"
  cat "$out/$name-figures.log"
}

kill_replica_at() { # RUN STEP: kills the process in which its vLLM computes
  local run=$out/runs/$1 step=$2 pid
  until [ -f "$run/metrics.jsonl" ] && [ "$(wc -l < "$run/metrics.jsonl")" -ge "$step" ]; do sleep 0.5; done
  for pid in $(grep -lsz "MEGASYNC_EXACT_SH=$run" /proc/[0-9]*/environ | cut -d/ -f3); do
    if grep -qs EngineCore "/proc/$pid/cmdline"; then
      kill -9 "$pid" && echo "killed the engine core $pid at step $step"
    fi
  done
}

for part in "$@"; do
  case $part in
    ladder) stories ladder-bfloat16 220 bfloat16 "$uncompiled"; stories ladder-exact 260 exact ;;
    ladder-head) stories ladder-head 220 "bfloat16 head" "$uncompiled" ;;
    ladder-float16) stories ladder-float16 220 float16 "$uncompiled" ;;
    ladder-default) LADDER=ladder-default stories ladder-default 260 bfloat16 ;;
    assets-3b) large_data ;;
    ladder-3b-bfloat16) LADDER=ladder-3b large ladder-3b-bfloat16 330 bfloat16 "$uncompiled" ;;
    ladder-3b-head) LADDER=ladder-3b large ladder-3b-head 330 "bfloat16 head" "$uncompiled" ;;
    ladder-3b-float16) LADDER=ladder-3b large ladder-3b-float16 330 float16 "$uncompiled" ;;
    ladder-3b-exact) LADDER=ladder-3b large ladder-3b-exact 450 exact ;;
    exact-eager) LADDER=ladder-eager stories exact-eager 300 exact rollout.enforce_eager=true ;;
    deterministic) deterministic ;;
    bisect) for rung in bfloat16 exact; do bisect "bisect-$rung" "$out/runs/ladder/$rung"; done ;;
    bisect-3b)
      large_data && mkdir -p "$out/runs/bisect-3b" && cp "$here/configs/grpo_gpu.yaml" "$out/runs/bisect-3b/config.yaml"
      for time in $(seq "${TIMES:-2}"); do bisect "bisect-3b-$time" "$out/runs/bisect-3b" "${large_sizes[@]}"; done ;;
    delta) delta delta 1 "${beside[@]}" ;;
    delta-link)
      export MEGASYNC_EXACT_SH=$out/runs/delta-link
      kill_replica_at delta-link "${KILL_AT:-80}" & watcher=$!
      delta delta-link 1 sync.transport=delta rollout.min_replicas=1 rollout.gpu_memory_utilization=0.12 rollout.kv_cache_bytes=8GiB
      kill "$watcher" 2>/dev/null || true ;;
    delta-layouts)
      STEPS=6 delta delta-lora 1 "${beside[@]}" engine.lora.rank=16
      STEPS=6 delta delta-pipeline 2 "${beside[@]}" engine.parallel.pipeline=2
      train delta-fsdp 200 2 "${beside[@]}" "${unseen[@]}" checkpoint.every_steps=2 engine.wrap=megatron_fsdp sync.log=deltas run.steps=4 "$uncompiled"
      STEPS=8 delta delta-fsdp 2 "${beside[@]}" checkpoint.every_steps=2 checkpoint.resume=auto engine.wrap=megatron_fsdp ;;
    delta-3b)
      large_data && limit delta-3b 900 "$python" -m megasync.launch.torchrun --nproc-per-node 1 -m megasync.train "$here/configs/grpo_gpu.yaml" \
        run.name=delta-3b run.dir="$out/runs" run.steps="${DELTA_STEPS:-100}" run.log_samples=0 sync.log=deltas sync.log_full_every=50 "${colocated[@]}" \
        "${large_sizes[@]}" rollout.max_new_tokens=64 "$uncompiled" "${extra[@]}" ;;
    delta-3b-figures)
      limit delta-3b-figures 900 "$python" "$here/docs/bench/version_figures.py" "$out/runs/delta-3b" --json "$out/delta-3b.json"
      cat "$out/delta-3b-figures.log" ;;
    tests) limit tests 300 "$python" -m pytest -m gpu -q -p no:cacheprovider "$here/tests/engine/model/test_exact.py" "$here/tests/exact/test_cuda.py"; tail -n 3 "$out/tests.log" ;;
    seeds)
      for seed in ${SEEDS:-0 1 2}; do
        for is_exact in ${EXACT:-false true}; do
          chosen=(model.exact=true)
          [ "$is_exact" = true ] || chosen=("$uncompiled")
          train "seed-$seed-exact-$is_exact" 900 1 "${beside[@]}" run.seed="$seed" rollout.evaluate_every_steps=20 checkpoint.every_steps=0 "${chosen[@]}"
        done
      done ;;
    *) echo "no such part: $part" >&2; exit 2 ;;
  esac
done
