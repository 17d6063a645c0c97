"""What trainer and vLLM both compute with under `model.exact`: functions whose rows do not depend on their neighbours.

A token's bits are a function of its own sequence alone, in whatever batch, packing, tile or chunk it is computed. Elementwise
operations and sums in a fixed order are so by their making; products of matrices are computed in tiles of one shape, and that
a row's place in its tile does not show is tried on each machine (machine.py). CPUs and float32 for now. A second backend
(vLLM's batch-invariant kernels, in bf16 on Hopper) would be these same names over CUDA tensors. Imports neither engine nor
bridge, which plug the functions into megatron-core and vLLM. Nothing here has gradients: the engine says what they are.

linear.py     products with a weight, adapters merged into it
pointwise.py  sums in a fixed order, RMSNorm, SiLU, log-probs
rotary.py     frequencies, angles and rotation
attention.py  queries of any sequences over blocks of keys, wherever these lie
machine.py    whether this machine's kernels are as the functions need them
"""
