"""The trainer's side of a sync.

publish.py       Publisher: one sync as a transaction, on every trainer rank
connection.py    what all sides agree on before the first sync
collectives.py   what the trainer's ranks tell each other
sender.py        one rank's pass over its weights: gather, pack, hand over, or drain
"""
