"""A run's weights as a Hugging Face folder, adapters merged if wanted: `megasync export`.

find.py     the weights that a run has
command.py  the command
"""
