"""Whether a config can run here, asked before anything starts. No torch in here.

check.py      all checks in order, and the command
banner.py     what a run will do, in words
data.py       the data files, episodes and vLLM's arguments, which vLLM itself is asked about
exact.py      what is not exact or deterministic
latent.py     multi-latent attention
own_answers.py  what rewards give to the answers of the data
preview.py    rendered prompts, what ends a response, and the rewards of the data's own answers
resume.py     the checkpoint that the run would go on from
settings.py   keys of the algorithm, ranks and the model's shape: what plans are checked by, too
sizes.py      the model's sizes against the layout, its memory and the number of ranks
unused.py     keys that have no effect beside others
"""
