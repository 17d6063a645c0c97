"""Samples become balanced micro-batches.

packed.py  how a micro-batch's tokens lie in memory: the data that batches, attention and routers share
batch.py   which samples make a micro-batch, and their packing (pure functions)
costs.py   what layers and attention cost (pure functions, no torch)
"""
