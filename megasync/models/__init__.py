"""Hugging Face model folders. Nothing imports torch at the start.

folder.py       the known models, and the checks of a folder
model_shape.py  the sizes of a model, and those of well-known ones
declared.py     fields of transformers' config classes, by their source
computed.py     fields by which models of the same weights differ
features.py     fields of config.json that the engine or vLLM would compute wrongly
tensors.py      the tensors that a config.json asks for, against those of a folder
merge.py        an adapter merged into its base model
"""
