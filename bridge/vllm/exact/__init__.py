"""vLLM's side of `model.exact`: the functions of exact/ by the doors that vLLM has for other layers. For vLLM's processes.

register.py   makes them known, in each process
layers.py     norms, activation, rotary embedding, linears
attention.py  attention over the paged cache, on CPUs
flash.py      on GPUs
"""
