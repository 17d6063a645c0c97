"""The weight bridge: from sharded Megatron parameters to running vLLM replicas, bucket by bucket, verified.

Each room imports only from those above it:

config.py      the YAML key `sync`, and what a replica is started with
messages.py    the typed messages and states of a sync
generation.py  what is to be generated, and what comes back
detokenizer.py what sampled token ids say, as text
processes.py   ends vLLM's processes with their replica, cleans /dev/shm
notes.py       what a replica's processes have to say to whoever started them
layout/        what a sync carries, in which bytes: manifest, buckets, regions, copies, digests, the baked plan
versions/      the log of every version: digests, or what changed
export/        megatron-core parameters become Hugging Face tensors: gathered, merged with their adapters, renamed
transport/     how buckets travel: shm, nccl, ipc
send/          the trainer's side of a sync: Publisher, one call on every rank
vllm/          all that depends on the vLLM version
receive/       the side of a vLLM worker: buckets become parameters
replicas/      the Ray actors that run vLLM: started, called, ended, cleaned up after
"""
