"""How fast replicas generate: `python -m megasync.bench rollout` and `staleness`.

requests.py    prompts and lengths of responses; generators that take turns
lora.py        rollout: merged weights beside a served adapter
throughput.py  rollout with bench.lora_rank=0: a replica beside vLLM's own `LLM.generate`
staleness.py   staleness: seconds of a number of batches by rollout.max_staleness
report.py      medians, ratios, and their tables
"""
