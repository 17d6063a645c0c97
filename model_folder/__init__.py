"""Hugging Face model folders, as engine, bridge and megasync read them. Imports none of these, and no torch.

files.py    the files that hold the weights
layout.py   where in config.json and in the tensors the language model lies
"""
