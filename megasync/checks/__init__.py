"""Whether a config can run here, checked before anything starts. No torch in here.

check.py        all checks in order, and the command
settings.py     keys against each other; plans check them, too
sizes.py        keys against the model's sizes and the number of ranks
served_sizes.py keys of replicas against the model's sizes
teacher.py      whether a model can be the policy's teacher
unused.py       keys that have no effect beside others
endpoint.py     whether a teacher's server answers, with the policy's tokenizer
fp8.py          what quantised replicas exclude
speculation.py  what drafts of tokens exclude
exact.py        settings that are not exact or not deterministic
data.py         evaluation sets, episodes, and vLLM's arguments, which vLLM itself is asked about
own_functions.py  losses, advantages, filters, callbacks and loggers of the user's own
resume.py       the checkpoint that the run would resume from
banner.py       a summary of what a run will do
preview.py      rendered prompts, what ends a response, and the rewards of the data's own answers
judges.py       keys of judges, and one try of each
own_answers.py  the rewards' scores of the data's own answers
"""
