"""What becomes of a run when a replica or a trainer rank is killed or stopped; tests/runs/test_faults.py runs it.

config.yaml  the run
cases.py     which process gets which signal, and when
episodes.py  the episodes of a run whose samples are such, one of which does what its case says
program.py   the training program with a replica that signals itself in a given phase, and a record of all that is trained on
worker.py    what that adds to a vLLM worker
orders.py    what these processes share through a folder
watch.py     starts a run, signals its ranks, and looks for what is left behind
nodes.py     a run on two nodes, of which one is lost; tests/runs/test_lost_nodes.py runs it
lost_table.py  many of these, at random moments: a table
judge.py     whether what was recorded is right
run.py       one case: prepared, run and judged
"""
