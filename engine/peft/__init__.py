"""Adapters to and from PEFT's folders.

fields.py   which fields of an adapter_config.json a plain LoRA adapter may have (no torch)
folder.py   what a PEFT folder says of itself, and whether it fits a config and a base model (no torch)
experts.py  the adapters of a layer's experts
factors.py  reads and writes the factors A and B
"""
