"""From data files to tokens.

files.py          which files hold a split of a data set
columns.py        what a table's columns hold, by its schema
tables.py         rows of JSONL, JSON, CSV, Parquet and Arrow files
conversations.py  messages, tools and template variables of a row
data.py           examples, and the order of prompts
tokenizer.py      the tokenizer of a model's folder
encoding.py       texts become token ids
template.py       its chat template
supervised.py     conversations as pieces of text, trained or given
prompts.py        prompts become tokens
load.py           all that a run reads, as far as it is short enough
"""
