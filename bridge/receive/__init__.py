"""The side of a vLLM worker: buckets become parameters.

receiver.py        the plug-in of vLLM's weight transfer
unpack.py          buckets become parameters, or tensors
plan.py            where a manifest's tensors go in a worker's parameters
bake.py            that plan, from the model's own loaders
shards.py          full tensors rebuilt from what workers hold
vllm_adapter.py    adapters in a running vLLM
vllm_reload.py     vLLM's layer-wise reload
vllm_experts.py    vLLM's fused experts
vllm_latent.py     vLLM's multi-latent attention
vllm_readback.py   what a vLLM worker holds, in Hugging Face names
"""
