"""`python -m megasync.bench`: weight sync, generation and training speed beside other methods, and numerical equivalence.

cli.py       the command; config.py has its keys, prepare.py checks them and writes a model
worker.py    one process of what is measured: a trainer rank, or one without Megatron
sync/        our weight sync beside other methods
generation/  tokens a second, with LoRA and beside vLLM's own; staleness
training/    training speed and memory by variant
gap/         log-probs of trainer and vLLM, rung by rung
equivalence/ every family in every layout against one rank, transformers, its folder and vLLM
nodes/       weight sync between several hosts, measured between namespaces and simulated
replicas/    vLLM's side of sync and generation
common/      what several of them share
"""
