"""What a response is worth: functions of ours and of the user's, scored in processes of their own.

answers/       where the answer stands in a response, and whether two are equal
functions.py   what a reward is given, and the rewards that have a name
resolve.py     `rollout.reward` becomes functions, checked and imported
wire.py        what travels between the trainer and the processes, and what is said of a reward that fails
program.py     the program of such a process
process.py     one process as the trainer holds it
suspects.py    who ended a process that several shared: tried again apart, in smaller sets
lane.py        some processes: who gets which sample, time limits, who is to blame
pool.py        the whole, as rollouts see it
"""
