"""Verbs that are no training: each is a room of its own, which imports the trainer and is imported by no other.

import_config/  a config of verl or TRL as one of ours
"""
