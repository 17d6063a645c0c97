"""The vLLM replicas: Ray actors that generate and take part in syncs.

replica.py    what runs in the Ray actor of one vLLM replica
generator.py  the requests that it works on
output.py     what its processes write
places.py     which nodes of a Ray they are put on
launched.py   those actors: launched and ended, and waiting for what they answer
actors.py     which of them there are to be: started anew, scaled
pool.py       ReplicaPool: the replicas as rank 0 of the trainer sees them
"""
