"""The log of a run's versions: digests of every tensor, and the weights as what changed since the version before.

weight_delta.py  what changed in a tensor, as few bytes (pure functions)
file.py     one stage's part of a version, whole or not there
writer.py   the log of a stage, version after version
prune.py    the oldest versions go
reader.py   any version out of it, verified
"""
