"""`python -m bench sync`: our weight sync beside other methods, in one run.

methods.py  the methods, which take turns; time, memory, and whether vLLM holds the trainer's weights
report.py   medians, ratios, and their tables
"""
