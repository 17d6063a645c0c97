"""What the launching verbs (submit, quickstart) share.

driver.py        runs within a Ray job: one actor a trainer rank
ray_cluster.py   a local Ray cluster of a run's own
processes.py     processes that end with the one that started them
"""
