"""Processes that run users' functions for the trainer, and end with it. Rewards and episodes use them. No torch in here.

failure.py    why a job has no value
protocol.py   messages between the trainer and a worker
process.py    one worker as the trainer holds it
fork_server.py  its parent, which forks it: no descendant outlives a worker
program.py    the program of a worker
children.py   the processes that one job starts
remote.py     workers on other nodes, in actors of Ray
job.py        a job with its clock, and the state of a worker
limits.py     the limit on a job's time
settings.py   the settings of a pool, and its error
suspects.py   jobs that shared a worker which died: tried again in smaller sets
pool.py       all workers of one function: which job runs where, and who is to blame
"""
