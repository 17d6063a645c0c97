"""A run on one rank.

loop.py        the order of things, on a page
session.py     engine, weights, rollouts and log, put together
checkpoints.py the one that it goes on from, with newer weights of the log, and those that it writes
argument_check.py  whether vLLM takes the arguments of a config
replica_start.py  Ray and vLLM come up while the engine is built
weights.py     the way of a run's weights to its replicas and into a Hugging Face folder
versions.py    the log of every version
canary.py      scores that tell damaged weights
scaling.py     more or fewer replicas, as somebody asks for them
placement.py   who uses shared GPUs when
ending.py      the last checkpoint and evaluation, the summary, the last lines
rank_zero.py   work that rank 0 does for all ranks, and the tokens of a batch to the ranks that train on them
step_log.py    what is written of each step: its times by phase, tokens on which both sides agree
supervised.py  held-out metrics and samples of supervised runs
heartbeat.py   ranks that are alive but stuck are found and ended
"""
