"""Model, data, warm-up and RL in one command: `megasync quickstart`.

command.py  the command
"""
