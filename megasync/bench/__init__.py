"""`python -m megasync.bench`: weight sync against the usual ways, generation with LoRA's two ways, and training speed.

cli.py       the command; config.py has its keys
worker.py    one trainer rank: rank.py is what every bench has there, sync.py and rollout.py what they measure
ways.py      the ways of a sync: wire.py those that only GPUs have, lora.py those of adapters; memory.py the meters
replica.py   the replicas' side, in an actor; vllm_worker.py in vLLM's workers
summary.py   what comes out; tables.py shows it to people, picture.py draws it; machine.py says on what
train.py     training speed by variant; train_rank.py is a rank of it
equivalence/ every family in every layout against one rank, transformers, its folder and vLLM
arrays.py    a large batch from the replicas' messages to the ranks that train on it
model.py     models for all this, random_engine.py also without files
"""
