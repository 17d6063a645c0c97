"""`python -m megasync.bench faults`: what becomes of a run when a replica or a trainer rank is killed or stopped.

cases.py    who is hit, when, and by which signal
program.py  the training program with replicas that hit themselves in a given phase, and a record of all that is trained on
watch.py    starts a run, hits its ranks, and sees what is left of it
judge.py    whether what was recorded is right
run.py      one case after another, as a table
"""
