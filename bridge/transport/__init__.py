"""How a bucket travels from a trainer rank to the vLLM workers.

shm.py       one host, shared memory: a
segment.py   with words that tell what lies in it
ipc.py       memory on a device that both sides share
nccl.py      process groups: NCCL between GPUs, gloo between CPUs; over
channel.py   one such group, its store, deadlines and aborts
errors.py    what goes wrong in all of them
"""
