"""A rank's part of the model on torch's meta device: what it holds, and what one micro-batch through it needs. No processes.

operations.py  what a traced call computes, for its seconds on a CPU
tracker.py     counts the bytes of storages while code runs on meta tensors
stand_ins.py   kernels and collectives that meta tensors cannot go through
ranks.py       one rank's model chunks on the meta device, in a world that needs no processes
activations.py one micro-batch through them
"""
