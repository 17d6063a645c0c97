"""How fast replicas generate: `python -m megasync.bench rollout`, `staleness` and `episodes`.

requests.py  prompts and lengths of responses; generators that take turns
rollout.py   rollout: merged weights beside a served adapter; with bench.lora_rank=0 a replica beside vLLM's own `LLM.generate`
staleness.py staleness: seconds of a number of batches by rollout.max_staleness
episodes.py  episodes: a replica's time beside tools that take some; tools.py is what is played
report.py    medians, ratios, and their tables
"""
