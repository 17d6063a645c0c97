"""All that depends on the vLLM version (0.26 on GPUs, 0.32 on CPUs). tests/bridge/vllm/test_vllm_contract.py holds it to both.

weights/  vLLM's parameters: where they lie, how they are loaded, read back and loaded again
exact/    vLLM's layers under model.exact
serving/  vLLM's engine: its arguments, scheduler and outputs
"""
