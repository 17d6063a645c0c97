"""A run's weights as a Hugging Face folder, adapters merged if wanted: `megasync export`.

command.py  the command
"""
