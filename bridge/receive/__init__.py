"""The side of a vLLM worker: buckets become parameters.

receiver.py  the plug-in of vLLM's weight transfer
unpack.py    buckets become parameters, or tensors
bake.py      the plan of where tensors go, from the model's own loaders
"""
