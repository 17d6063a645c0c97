"""Changes the number of replicas of an active run: `megasync scale`.

command.py  the command
"""
