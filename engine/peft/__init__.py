"""Adapters to and from PEFT's folders.

folder.py   what a PEFT folder says of itself, and whether it fits a config (no torch)
experts.py  the adapters of a layer's experts
factors.py  reads and writes the factors A and B
"""
