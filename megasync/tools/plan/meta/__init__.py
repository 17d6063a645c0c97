"""A rank's part of the model on torch's meta device: its parameters, and the memory of one micro-batch. No processes.

tracker.py     counts the bytes of storages while code runs on meta tensors
stand_ins.py   replaces kernels and collectives that meta tensors cannot run
ranks.py       one rank's model chunks on the meta device, in a world that needs no processes
activations.py one micro-batch through them
"""
