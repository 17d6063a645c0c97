"""Samples become balanced micro-batches.

packed.py  how a micro-batch's tokens lie in memory: the data that batches, attention and routers share
batch.py   samples as a table, and packed into a micro-batch
costs.py   what layers and attention cost (pure functions, no torch)
plan.py    which samples make a micro-batch (pure functions, no torch)
"""
