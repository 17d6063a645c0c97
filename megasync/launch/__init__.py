"""What the launching verbs (submit, quickstart) share.

driver.py       runs within a Ray job: one actor a trainer rank
cluster_room.py whether a run fits into a cluster's nodes
render.py       job files for Slurm and KubeRay
launcher.py     whether a launcher has started this process as a rank
torchrun.py     torchrun for the ranks of this node
included.py     packages and modules of the user's that travel with a job
job_server.py   a job of Ray's job server: submitted, followed, stopped
last_words.py   what a run that failed says last
ray_cluster.py  a Ray of a run's own
ray_agent.py    stands for the agent of its dashboard
stop_request.py which `stop` in a run's folder is asked of this run
scope.py        a run's processes, temporary files and sockets, and their end
processes.py    processes that end with the one that started them
devices.py      which GPUs trainer ranks and replicas get
num_ranks.py    how many trainer ranks a run gets when nobody says
"""
