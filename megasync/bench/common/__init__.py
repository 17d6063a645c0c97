"""What several benches share.

model.py          model folders: a small Qwen3 whole, or larger shapes in sparse files
random_engine.py  engines without weights on the disk
rank.py           a trainer rank: the layout, vLLM replicas, a comparison of weights
lora.py           an engine with adapters and a vLLM that serves them
processes.py      ranks in processes of their own, with a log and a time limit
memory.py         peak memory of processes and GPUs
results.py        the machine's description, JSON files, tables
"""
