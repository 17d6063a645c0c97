"""`python -m bench train`: training speed and memory of several variants.

variants.py  starts the ranks of one variant after another, and their table
rank.py      what each rank does
flops.py     what a step costs by the sizes of a model
"""
