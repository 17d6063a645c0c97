"""A run on one rank.

loop.py        the order of things, on a page
session.py     engine, weights, rollouts and log, put together
checkpoints.py the one that it goes on from, and those that it writes
saving.py      when it writes them
newer.py       the weights of the steps after a checkpoint
argument_check.py  whether vLLM takes the arguments of a config
replica_start.py  Ray and vLLM come up while the engine is built
weights.py     the way of a run's weights to its replicas and into a Hugging Face folder
versions.py    the log of every version
canary.py      scores that tell damaged weights
scaling.py     more or fewer replicas, as somebody asks for them
scale_request.py  how it is asked, and answered
placement.py   who uses shared GPUs when
clock.py       where the time goes, by phase
ending.py      the last checkpoint and evaluation, the summary, the last lines
rank_zero.py   work that rank 0 does for all ranks
distribute.py  the tokens of a batch to the ranks that train on them
step_log.py    what is written of each step
sameness.py    tokens on whose log-probs both sides agree
heartbeat.py   ranks that are alive but stuck are found and ended
"""
