"""Episodes of many turns: what was sampled and what was given, token for token. No torch in here.

segments.py   turns become training sequences: each sampled token once, with its log-prob and version
"""
