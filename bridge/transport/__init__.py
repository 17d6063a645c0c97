"""How a bucket travels from a trainer rank to the vLLM workers.

shm.py       one host, shared memory
nccl.py      process groups: NCCL between GPUs, gloo between CPUs; over
channel.py   one such group, its store, deadlines and aborts
"""
