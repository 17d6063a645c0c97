"""The vLLM replicas: Ray actors that generate and take part in syncs.

vllm_api.py        what depends on the vLLM version outside of the workers
vllm_arguments.py  which fields of its EngineArgs a config may set
replica.py         what runs in the Ray actor of one vLLM replica
generator.py       the requests that it works on
vllm_outputs.py    tokens that wait in its engine core until their request ends
vllm_plain_tokens.py  how they pass most of its scheduler by
output.py          what its processes write
processes.py       ends vLLM's processes with their replica, cleans /dev/shm
actors.py          those actors: started, called, ended
answers.py         waiting for what they answer
pool.py            ReplicaPool: the replicas as rank 0 of the trainer sees them
"""
