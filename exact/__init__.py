"""Functions that trainer and vLLM both use under `model.exact`: their rows do not depend on their neighbours.

A token's bits are a function of its own sequence alone, in whatever batch, packing, tile or chunk it is computed. On CPUs, in
float32, elementwise operations and sums in a fixed order are so by their making, and products of matrices are computed in tiles
of one shape. On Hopper GPUs, in bfloat16, they are the kernels of vLLM's batch-invariant mode and two of ours. That a row's place
does not show is tried on each machine. Imports neither engine nor bridge, which plug the functions into megatron-core and vLLM;
and of vLLM, on GPUs alone, the kernels. The engine defines their gradients.

linear.py        products with a weight, adapters merged into it
pointwise.py     sums in a fixed order, RMSNorm, SwiGLU, log-probs
rotary.py        frequencies, angles and rotation
attention.py     queries of any sequences over blocks of keys, wherever these lie; on CPUs
machine.py       whether this machine's kernels are as the functions need them
cuda.py          products, log-probs and attention on GPUs
kernels.py       RMSNorm, rotation and SwiGLU on GPUs
merge_kernel.py  adapters merged on GPUs
cuda_machine.py  whether a GPU's kernels are as the functions need them
"""
