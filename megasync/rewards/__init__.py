"""Rewards of responses: functions of ours and of the user's, scored in worker processes.

answers/       where the answer stands in a response, and whether two are equal
functions.py   the input of a reward, and the rewards that have a name
resolve.py     `rollout.reward` becomes functions, checked and imported
program.py     the functions as workers run them
failures.py    the error of a reward that fails
pool.py        all rewards of a run, as rollouts use them
"""
