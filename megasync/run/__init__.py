"""A run on one rank.

loop.py        the order of things, on a page
session.py     the parts of every run
rollout_session.py  a run that trains on what its replicas generate
supervised.py  a run that trains on given answers
weights.py     the engine's weights as Hugging Face tensors, and as an exported folder
sync.py        the replicas are brought to these weights
versions.py    the log of every version
canary.py      scores that find damaged weights
scaling.py     more or fewer replicas, on request
placement.py   who uses shared GPUs when
replica_start.py  Ray and vLLM start while the engine is built
argument_check.py  whether vLLM takes the arguments of a config
checkpoints.py the checkpoint that a run resumes from, with newer weights of the log, and those that it writes
teacher.py     the teacher as the engine takes it; a version of the run as a folder
ending.py      the last checkpoint and evaluation, the summary, the last lines
rank_zero.py   work that rank 0 does for all ranks, parts that only rank 0 has, and the scatter of a batch's tokens
step_log.py    the lines of each step: times by phase, metrics, samples
heartbeat.py   stopped ranks are named, and the run ends
"""
