"""The vLLM replicas: Ray actors that generate and take part in syncs.

replica.py    what runs in the Ray actor of one vLLM replica
generator.py  the requests that it works on
output.py     the log of its processes
places.py     which nodes of a Ray they are put on
launched.py   actors are launched, ended and waited for
states.py     the states of a replica's number
actors.py     how many are wanted: replaced, scaled
pool.py       ReplicaPool: the replicas as rank 0 of the trainer sees them
"""
