"""`megasync import`: a config of verl or TRL as one of ours, and a list of all that could not be carried over.

carried.py  the keys that are carried over, and why others are not
verl.py     what verl's values mean
trl.py      what those of TRL's GRPOConfig mean
command.py  reads, writes and says what is left to do
"""
