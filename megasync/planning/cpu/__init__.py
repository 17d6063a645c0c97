"""Seconds of a run's processes on this machine's CPU: what was traced of a step is called again, and timed.

calls.py     one call of each kind, in its shapes or in part
together.py  their seconds in as many processes at once as will share the cores
kept.py      what other runs have timed, where that is asked for
passes.py    what they come to: passes, optimizer steps
decoding.py  and the steps of a replica
"""
