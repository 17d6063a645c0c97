"""Hugging Face model folders. Nothing imports torch at the start.

folder.py    which models there are, and what is wrong with a folder
features.py  what a config.json says that training or vLLM would get wrong
windows.py   sliding windows that are refused
merge.py     an adapter merged into its base model
shapes.py    sizes of well-known models, for random ones of that size
"""
