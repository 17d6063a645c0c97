"""A run's config: what the keys mean, how they are read, and what is checked before anything starts. No torch.

schema.py         all keys, joined once; the models of `model`, `engine`, `algorithm` and `sync` are in engine/ and bridge/
keys.py           what those models say of a key: name, choices, bounds, nearest
load.py           reads YAML files and `key=value` overrides
invalid.py        what pydantic refuses, in words
check.py          tries a config against model, data, number of ranks and the run's folder
check_algorithm.py  its part about what an algorithm is made of
check_sizes.py    its part about numbers that must fit each other
check_latent.py   its part about multi-latent attention
check_data.py     its part about data, evaluation sets and vLLM's arguments
json_schema.py    writes the JSON schema that editors use
model_folder.py   what a Hugging Face folder says of its model; model_features.py, model_windows.py: what the engine has not
errors.py         errors that name key, value, choices and remedy
"""
