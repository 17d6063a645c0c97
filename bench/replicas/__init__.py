"""vLLM's side of the benches.

replica.py      a replica with the other methods' calls beside our own, and one of vLLM's own `LLM.generate`
vllm_worker.py  the same in vLLM's workers
nccl.py         raw broadcasts, and vLLM's own packed transfer, both sides of which need GPUs
"""
