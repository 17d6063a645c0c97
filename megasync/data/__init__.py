"""From data files to tokens.

tables.py     rows of JSONL and Parquet files and of saved data sets
data.py       examples, and the order of prompts
tokenizer.py  the tokenizer of a model's folder
prompts.py    prompts become tokens
"""
