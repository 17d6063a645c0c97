"""A run's config: what the keys mean and how they are read. No torch.

schema.py       all keys, joined once; the models of `model`, `engine`, `algorithm` and `sync` are in engine/ and bridge/, that of
data_section.py  `data` here
keys.py         what those models say of a key: name, choices, bounds, nearest
others.py       keys of verl, TRL and others: which of ours has the same meaning
load.py         reads YAML files and `key=value` overrides; what pydantic refuses, in words
named.py        what a user names as package.module:name
others.py       keys of verl and TRL, and which of ours they mean
errors.py       errors that name key, value, choices and remedy
json_schema.py  writes the JSON schema that editors use
reference.py    writes docs/reference.md, a table of all keys
own_packages.py  a user's files with the names of our packages
shipped.py      files that come with the program
files.py        files that are written whole or not at all
"""
