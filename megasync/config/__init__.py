"""A run's config: what the keys mean, how they are read, and what is checked before anything starts. No torch.

schema.py         all keys, joined once
load.py           reads YAML files and `key=value` overrides
check.py          tries a config against model, data and number of ranks
model_folder.py   what a Hugging Face folder says of its model
errors.py         errors that name key, value, choices and remedy
"""
