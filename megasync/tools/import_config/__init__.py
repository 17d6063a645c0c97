"""Converts a config of verl or TRL, and lists keys without a counterpart: `megasync import`.

carried.py  keys that are carried over, and reasons for the others
verl.py     rules for verl's values
trl.py      rules for values of TRL's GRPOConfig
command.py  the command: reads, writes, and lists steps that are left to the user
"""
