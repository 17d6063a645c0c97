"""What generates a batch: from prompts to rewarded samples.

rollout.py     the samples of a run: prompts, rewards, batches
stream.py      the stream of groups, in a thread beside the trainer
loop_thread.py  an event loop in a thread of its own
dispatch.py    groups on their way to the replicas and back
scheduler.py   which groups begin, where, and which make a batch: pure functions
turns.py       episodes of a group's members, whose turns are handed out
attempt.py     one of these at an episode, and its turns as groups
played.py      episodes that have ended: samples of their branches, metrics
group.py       a prompt with its samples
progress.py    what a checkpoint keeps of all that
records.py     what was trained, a file a step, from which it can be sampled again
restore.py     which of these groups go on in a resumed run
requests.py    what a replica is asked, a reward gets, and samples.jsonl keeps of one example
token_lines.py  what samples.jsonl keeps of the tokens of a response or an episode
ties.py        groups whose rewards are all equal
evaluation.py  mean reward, avg@k and pass@k on held-out sets
"""
