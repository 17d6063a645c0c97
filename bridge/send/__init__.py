"""The trainer's side of a sync.

publish.py       Publisher: one sync as a transaction, on every trainer rank
connection.py    the plan and the endpoints that all sides agree on before the first sync; the collectives of a sync
sender.py        one rank's pass over its weights: gather, pack, hand over; after a failure iterate without sending
"""
