"""The weight bridge: from sharded Megatron parameters to running vLLM replicas, bucket by bucket, verified.

Each room imports only from those above it:

config.py      the YAML key `sync`, and what a replica is started with
messages.py    the typed messages and states of a sync
generation.py  requests and completions
detokenizer.py the text of sampled token ids
processes.py   ends vLLM's processes with their replica, cleans /dev/shm
notes.py       notes of a replica's processes to the actor that started them
layout/        what a sync carries, in which bytes: manifest, buckets, regions, copies, digests, the baked plan
versions/      the log of every version: digests, or the changes
export/        megatron-core parameters become Hugging Face tensors: gathered, merged with their adapters, renamed
transport/     transports of buckets: shm, nccl, ipc, delta
send/          the trainer's side of a sync: Publisher, one call on every rank
vllm/          all that depends on the vLLM version
receive/       the side of a vLLM worker: buckets become parameters
replicas/      the Ray actors that run vLLM: started, called, ended, cleaned up after
"""
