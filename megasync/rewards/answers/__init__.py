"""Answers in texts: where they stand, and whether two are equal.

units.py      units, currencies and words for powers of ten, by one name each
tidy.py       one spelling of an answer: LaTeX without what does not change its meaning
notation.py   lists, tuples, intervals, sets, unions and matrices taken apart; numbers, times and bases
last_value.py the last value in a sentence
read.py       which part of a response is its answer
formulas.py   whether two formulas are equal, by math-verify
values.py     whether two single values are equal: numbers, units, words
equal.py      whether two answers are equal, part by part
"""
