"""How far trainer and vLLM are apart about the same tokens, and what it costs to bring them nearer: a rung of the ladder each.

run.py   one rung after the other, the table
rank.py  one rung: vLLM generates, the trainer scores and takes a step
"""
