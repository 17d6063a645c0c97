"""What generates a batch, from the data file to rewarded samples.

rollout.py      the samples of a run: prompts, rewards, batches
stream.py       the stream of groups, in a thread beside the trainer
dispatch.py     groups on their way to the replicas and back
scheduler.py    which groups begin, where, and which make a batch: pure functions
group.py        a prompt with its samples
progress.py     what a checkpoint keeps of all that
requests.py     what a replica is asked, a reward gets, and samples.jsonl keeps of one example
evaluation.py   accuracy, avg@k and pass@k on held-out sets
data.py         examples, and the order of prompts
tables.py       rows of JSONL and Parquet files and of saved data sets
prompts.py      prompts become tokens
rewards/        what a response is worth, in processes of their own
"""
