"""Hugging Face model folders. Nothing imports torch at the start.

folder.py       which models there are, and what is wrong with a folder
model_shape.py  the sizes of a model
types.py        the types of what a config.json says
features.py     what a config.json says that training or vLLM would get wrong
windows.py      sliding windows that are refused
tensors.py      the tensors that a config.json asks for, against those of a folder
merge.py        an adapter merged into its base model
shapes.py       sizes of well-known models, for random ones of that size
"""
