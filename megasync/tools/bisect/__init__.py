"""Compares trainer and replica on one response, module by module: `megasync bisect`.

sites.py       the results that are compared, in order
choose.py      the weights, as each side has them
response.py    the response
side.py        the tensors of one side
reference.py   transformers' modules in float64, and the bound of rounding
judge.py       each module against its reference, and the sides against each other
compare.py     all of it together
text.py        the findings as text
command.py     the command
"""
