"""Weights of a run, a checkpoint or a Hugging Face folder, served by the replicas that runs have: for generate and evaluate.

source.py    which weights, and by which config they are asked
replicas.py  a Ray and replicas for them; a folder for what is made of them on the way
answers.py   what they are asked, and what the answers are worth, with confidence intervals
compare.py   what a step was trained on, to be sampled again, and where that differs
scored.py    what a step was trained on, scored by the trainer's model
send.py      weights of other folders for replicas that run
rerun.py     the environments of recorded episodes, run again
"""
