"""The program: puts engine, bridge, Ray and vLLM together. Every entry is `python -m megasync.<verb>`.

train.py          one rank of a run; session.py puts its parts together, loop.py is the order of things
weights.py        the way of a run's weights to its replicas and into a Hugging Face folder
devices.py        which GPUs trainer ranks and replicas get; placement.py is who uses shared ones when
rank_zero.py      work that rank 0 does for all ranks
distribute.py     the tokens of a batch to the ranks that train on them
submit.py         the same program through Ray's job API
quickstart.py     model, data, warm-up and RL in one command; assets.py writes model and data
export.py         a run's weights as a Hugging Face folder
report.py         a run's report.html
num_ranks.py      how many trainer ranks a run gets when nobody says
model_shapes.py   sizes of well-known models, for random ones of that size
files.py          files that are written whole or not at all
config/           all keys, read and checked
rollouts/         batches: data, prompts, generation, rewards
launch/           Ray jobs, local clusters, processes
reporting/        logs, timeline, progress
bench/            figures of this machine: weight sync, generation with LoRA, training
"""
