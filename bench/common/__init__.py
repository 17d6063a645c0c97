"""Code that several benches share.

model.py          model folders: config.json, and random weights or sparse files
random_engine.py  engines without weights on the disk
program.py        a measurement in a process of its own, which keeps its results so far
rank.py           a trainer rank: the layout, vLLM replicas, rounds of syncs, a comparison of weights, LoRA
processes.py      starts programs and ranks; with a log and a time limit
memory.py         peak memory of processes and GPUs
results.py        the machine's description, JSON files, tables
"""
