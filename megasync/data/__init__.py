"""From data files to tokens.

tables.py   rows of JSONL and Parquet files and of saved data sets
data.py     examples, and the order of prompts
prompts.py  prompts become tokens
"""
