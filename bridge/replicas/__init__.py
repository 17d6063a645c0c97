"""The vLLM replicas: Ray actors that generate and take part in syncs.

replica.py    what runs in the Ray actor of one vLLM replica
generator.py  the requests that it works on
output.py     what its processes write
places.py     which nodes of a Ray they are put on
actors.py     those actors: started, called, ended
answers.py    waiting for what they answer
pool.py       ReplicaPool: the replicas as rank 0 of the trainer sees them
"""
