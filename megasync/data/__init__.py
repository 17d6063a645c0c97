"""From data files to tokens.

files.py          finds the files of a split of a data set
columns.py        decodes a table's columns by its schema
tables.py         rows of JSONL, JSON, CSV, Parquet and Arrow files
conversations.py  messages, tools and template variables of a row
data.py           examples, and the order of prompts
sampler.py        samplers of prompts, and their state
tokenizer.py      the tokenizer of a model's folder
encoding.py       encodes texts of prompts and answers as token ids
template.py       the model's chat template
supervised.py     cuts conversations into pieces of text that are trained or not
prompts.py        encodes prompts and answers of examples
lengths.py        limits of a sample's length
load.py           loads a run's data, without examples that are too long
packages.py       pinned packages that few runs need, installed by pip into a cache folder
reasoning_gym.py  tasks of reasoning-gym as data, and their scores
"""
