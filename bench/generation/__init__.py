"""How fast replicas generate: `python -m bench rollout`.

requests.py  prompts and lengths of responses; generators that take turns
rollout.py   rollout: merged weights beside a served adapter; with bench.lora_rank=0 a replica beside vLLM's own `LLM.generate`
report.py    medians, ratios, and their tables
"""
