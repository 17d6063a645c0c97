"""What several benches share.

model.py          model folders: a small Qwen3 whole, or larger shapes in sparse files
random_engine.py  engines without weights on the disk
program.py        a measurement in a process of its own, which keeps its results so far
one_replica.py    the same with a vLLM replica
rank.py           a trainer rank: the layout, vLLM replicas, rounds of syncs, a comparison of weights, LoRA
processes.py      starts programs and ranks; with a log and a time limit
memory.py         peak memory of processes and GPUs
results.py        the machine's description, JSON files, tables
"""
