"""Rewards of responses: functions of ours and of the user's, scored in worker processes, and models that judge.

answers/       where the answer stands in a response, and whether two are equal
judges/        a model is asked, and its reply holds the reward
functions.py   the input of a reward, and the rewards that have a name
resolve.py     `rollout.reward` becomes functions, checked and imported, and names of judges
program.py     the functions as workers run them
failures.py    the error of a reward that fails
pool.py        all rewards of a run, as rollouts use them
"""
