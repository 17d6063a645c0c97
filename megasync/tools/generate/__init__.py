"""Responses of a run or a model to prompts: `megasync generate`.

command.py  the command
"""
