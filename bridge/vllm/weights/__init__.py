"""Parameters in vLLM's workers.

adapter.py   LoRA adapters that vLLM serves beside the base weights
delta_net.py gated delta nets: fused projections, packed convolutions
experts.py   fused experts: where each expert's linears lie
fp8.py       layers in FP8, and what vLLM does to their weights after loading
fp8_config.py  which layers these are
gpt_oss.py   gpt-oss: its names, sinks, experts in one tensor
latent.py    multi-latent attention: tensors that vLLM derives from its weights
readback.py  parameters back into Hugging Face names and layout
reload.py    layers whose weights vLLM transforms after loading
"""
