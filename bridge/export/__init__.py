"""megatron-core parameters become what a sync sends: tensors in Hugging Face's layout, or adapters in PEFT's.

source.py         protocols: items of the engine, sources as exporter.py and adapter.py are; whole tensors
exporter.py       parameters become Hugging Face tensors, in layer order
weights.py        parameters taken apart into what is converted at once
gather.py         plans of passes: shards gathered, adapters merged, into memory to copy out of
trace.py          a conversion as copies, recorded once
merge.py          adapters merged into their weights (pure functions)
adapter.py        the adapters alone as a source
fp8.py            a source whose linears are quantised,
fp8_kernel.py     and on CUDA
"""
