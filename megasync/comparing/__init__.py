"""Trainer and replica led through one response, module by module: what `megasync bisect` does.

shape.py            what a folder says that a model computes
formulas.py         what norms, attention and other modules compute
reference.py        what each module should give, in float64, and the bound of rounding
judge.py            each module against its reference, and the sides against each other
cases.py            a module that is wrong, and guesses
linear_kinds.py     guesses for linears
attention_kinds.py  guesses for attention and its rotary embedding
kinds.py            guesses for all, and patterns where none fits
response.py         the response
weights.py          the weights, as each side has them
compare.py          all of it together
trainer_side.py     the trainer's model and the references, beside a replica
text.py             what was found, in words
"""
