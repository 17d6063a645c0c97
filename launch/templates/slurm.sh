#!/usr/bin/env bash
# @{name} on @{nodes} nodes by Slurm. Made by: @{command}
#SBATCH --job-name=@{name}
#SBATCH --nodes=@{nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@{cpus}
#SBATCH --time=@{time}
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@@@{grace_seconds}
@{more_lines}
set -euo pipefail
cd @{here}

# Before the time limit the run is asked to stop: it ends its step, writes a checkpoint and leaves with 75; then the job is queued again.
is_over_soon=false
stop() { is_over_soon=true; mkdir -p @{run_folder} && touch @{run_folder}/stop; }
trap stop USR1

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
srun --kill-on-bad-exit=0 --wait=0 @{root}/launch/torchrun_nodes.sh @{arguments} \
  --nodes "$nodes" --head "${nodes%%,*}:@{port}" --nproc @{nproc} --max-restarts @{max_restarts} &
launchers=$! code=0
until wait "$launchers"; do # the signal interrupts it
  code=$?
  kill -0 "$launchers" 2>/dev/null || break
  code=0
done
if $is_over_soon && [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
