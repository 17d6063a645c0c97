"""Held-out results of a run, a checkpoint or a Hugging Face folder: `megasync evaluate`.

estimates.py  means over prompts with their confidence intervals
command.py    the command
"""
