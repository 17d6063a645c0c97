"""Attention over packed sequences.

core.py     the core attention of our layer spec, and the sequence-parallel RMSNorm
flash.py    its kernels on GPUs
dense.py    on CPUs, and of float32
fused.py    rotary embedding and log-probs in one kernel each, with CUDA
context.py  context parallelism: sequences that several ranks share
windows.py  how many tokens each layer attends to (no torch)
rope.py     rotary frequencies, scaled as config.json says
latent.py   multi-latent attention, with projections of its own
delta_net.py          the gated delta net, in place of attention
delta_net_kernels.py  its kernels on GPUs
"""
