"""The program: puts engine, bridge, Ray and vLLM together. Every entry is `python -m megasync.<verb>`.

train.py       one rank of a run
submit.py      the same program through Ray's job API
quickstart.py  model, data, warm-up and RL in one command
assets.py      writes a model and data to try it with
export.py      a run's weights as a Hugging Face folder
report.py      a run's report.html

Each room imports only from those above it, verbs from all:

config/        all keys, as pydantic models; loading and errors
hf/            Hugging Face model folders, read without torch
launch/        Ray jobs, local clusters, processes, which GPUs each gets
reporting/     logs, timeline, progress
examples/      a small real model and tasks for it, an episode
data/          examples and prompts, from files to tokens
rewards/       what a response is worth, in processes of their own
episodes/      many turns: segments of sampled and given tokens
rollouts/      batches: a stream of groups, generated and rewarded
run/           a run on one rank: session, loop, weights
checks/        whether a config can run here
bench/         figures of this machine: weight sync, generation, training
"""
