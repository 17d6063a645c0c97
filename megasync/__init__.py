"""The program: puts engine, bridge, Ray and vLLM together. Every entry is a verb of `megasync`.

cli.py         the command: which verbs there are
train.py       starts a run on this machine, or is one rank of it
submit.py      the same program through Ray's job API
quickstart.py  model, data, warm-up and RL in one command
assets.py      writes a model and data to try it with
scale.py       more or fewer replicas for a run that goes on
export.py      a run's weights as a Hugging Face folder
report.py      a run's report.html
plan.py        what a run will take, before it starts
doctor.py      whether this machine is fit for a run
generate.py    responses to prompts
evaluate.py    held-out results with confidence intervals
bisect.py      the first module that trainer and replica compute otherwise
replay.py      what a step was trained on, sampled again

Each room imports only from those above it, verbs from all:

config/        all keys, as pydantic models; loading and errors
hf/            Hugging Face model folders, read without torch
launch/        ranks as Ray actors, a Ray of a run's own, processes, which GPUs each gets
reporting/     logs, timeline, progress
examples/      a small real model and tasks for it, an episode
data/          examples and prompts, from files to tokens
rewards/       what a response is worth, in processes of their own
episodes/      many turns: segments of sampled and given tokens
rollouts/      batches: a stream of groups, generated and rewarded
planning/      memory and seconds of a run, predicted and compared
run/           a run on one rank: session, loop, weights
checks/        whether a config can run here
diagnosis/     whether this machine is fit for it
serving/       weights of a run or folder, served for generate and evaluate
comparing/     trainer and replica, module by module
nodes/         a run on several nodes, the same command on each
tools/         verbs that are no training, a room each
bench/         figures of this machine: weight sync, generation, training
"""

from megasync.config.own_packages import find_ours_first

find_ours_first()
