"""megatron-core parameters become what a sync sends: Hugging Face tensors, or PEFT's.

source.py         what a sync sends: the protocol that exporter.py and adapter.py implement
exporter.py       parameters become Hugging Face tensors, in layer order
gather.py         the parameters' values come together: shards gathered, adapters merged
trace.py          what a conversion copies where, recorded once
merge.py          adapters merged into their weights (pure functions)
merge_kernel.py   the same on CUDA
adapter.py        the adapters alone as what a sync carries
"""
