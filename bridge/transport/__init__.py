"""Transports of buckets from a trainer rank to the vLLM workers.

protocol.py  Writer and Reader, which all transports implement, and their errors
open.py      opens them: the choice of `auto`, and which transport an endpoint belongs to
shm.py       shared memory of one host: a
segment.py   with words that tell what lies in it
ipc.py       memory on a device that both sides share
nccl.py      process groups: NCCL between GPUs, gloo between CPUs; over
lanes.py     from several senders to several hosts, and on inside of each, by
ports.py     where one reader gets a lane's buckets from; over
delta.py     what changed since the last sync, for slow links; over
channel.py   one such group, its deadlines and aborts; over
store.py     where its members find each other
"""
