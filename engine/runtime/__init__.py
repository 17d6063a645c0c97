"""The engine's base: the device, megatron-core and its work-arounds, process groups.

device.py        the device that a rank computes on
fake_cuda.py     lets megatron-core, megatron-fsdp and mbridge run without CUDA
megatron.py      megatron-core's names, imported once that is in place
workarounds.py   changes to megatron-core, megatron-fsdp and mbridge, each with its reason
gloo.py          process groups on CPUs share their threads, and add in an order of their own
parallel.py      process groups from a ParallelConfig
tensor_file.py   a safetensors file, readable by whom the umask lets
memory.py        the setting of torch's allocator, and how much memory is in use
random_state.py  the states of all random generators, saved and restored; settings for equal bits
"""
