"""What generates a batch: from prompts to rewarded samples.

rollout.py     the samples of a run: prompts, rewards, batches
stream.py      the stream of groups, in a thread beside the trainer
loop_thread.py  an event loop in a thread of its own
dispatch.py    groups on their way to the replicas and back
scheduler.py   which groups begin, where, and which make a batch: pure functions
turns.py       episodes of a group's members, whose turns are handed out; samples of their branches, metrics
attempt.py     one of these at an episode, and its turns as groups
group.py       a prompt with its samples; which go on in a resumed run, and those whose rewards are all equal
progress.py    what a checkpoint keeps of all that
records.py     what was trained, a file a step, from which it can be sampled again
requests.py    what a replica is asked, a reward gets, and samples.jsonl keeps of one example and its tokens
evaluation.py  mean reward, avg@k and pass@k on held-out sets
"""
