"""Seconds of a run's processes on this machine's CPU: what was traced of a step is called again, and timed.

calls.py     one call of each kind, in its shapes or in part
together.py  their seconds in as many processes at once as will share the cores
kept.py      what runs have timed within an hour
passes.py    what they come to: passes, optimizer steps, products of a replica
"""
