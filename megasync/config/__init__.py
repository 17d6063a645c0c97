"""A run's config: the meaning of its keys, and how they are read. No torch.

schema.py        all keys, joined once; those of `model`, `engine`, `algorithm` and `sync` are in engine/ and bridge/
data_section.py  the keys of `data`; judge_section.py, service_section.py, teacher_section.py those of their sections;
                 replica_keys.py keys of the replicas of teachers and judges
keys.py          full name, choices, bounds and nearest name of a key, from the pydantic models
others.py        keys of verl, TRL and slime, and the keys here with the same meaning
load.py          reads YAML files and `key=value` overrides
invalid.py       pydantic's errors, explained
named.py         imports functions and classes given as package.module:name
errors.py        errors that name key, value, choices and remedy
own_packages.py  user files with the names of megasync's packages
shipped.py       configs and other files that come with the package
files.py         names, locks and atomic writes of a run's files
"""
