"""`python -m bench train`: training speed and memory of one config.

rank.py     a trainer rank, which trains on random tokens and times it
flops.py    operations of a step, by config.json
report.py   the tables
"""
