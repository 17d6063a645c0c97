"""Rewards that ask a model: `judges` in the config, judge:NAME in `rollout.reward`.

prompt.py   a sample becomes the judge's messages
reply.py    the score in a judge's reply
cache.py    replies by content, in a file of the run's folder
judge.py    one judge, and all judges of a run: limits, retries, counts
"""
