"""What the launching verbs (submit, quickstart) share.

driver.py       one actor a trainer rank, within a Ray job or with a Ray of its own
torchrun.py     torchrun on one machine
last_words.py   what a run that failed says last
ray_cluster.py  a Ray of a run's own
scope.py        a run's processes, temporary files and sockets, and their end
processes.py    processes that end with the one that started them
devices.py      which GPUs trainer ranks and replicas get
num_ranks.py    how many trainer ranks a run gets when nobody says
"""
