"""`python -m bench`: weight sync, generation and training speed beside other methods, and numerical equivalence.

cli.py       the command; config.py has its keys, prepare.py checks them and writes a model
run_figures.py   seconds, speed, rewards, gaps and memory of runs, from their folders; for gpus.sh and peers/run.sh
same_metrics.py  whether two runs wrote the same numbers
worker.py    one measured process: a trainer rank, or one without Megatron
sync/        our weight sync beside other methods
generation/  tokens a second, with LoRA and beside vLLM's own
training/    training speed and memory of a config
equivalence/ every family in every layout against one rank, transformers, its folder and vLLM
replicas/    vLLM's side of sync and generation
common/      what several of them share
"""
