"""Hugging Face model folders. Nothing imports torch at the start.

folder.py       which models there are, and what is wrong with a folder
model_shape.py  the sizes of a model, and those of well-known ones
features.py     what a config.json says that training or vLLM would get wrong
tensors.py      the tensors that a config.json asks for, against those of a folder
merge.py        an adapter merged into its base model
"""
