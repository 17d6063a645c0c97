"""The responses that a step was trained on, sampled again and compared token by token: `megasync replay`.

sampled.py  recorded turns, sampled again by replicas
scored.py   recorded responses, scored by the trainer's model
results.py  the results of steps, and their text
command.py  the command
"""
