"""Starting a run: on this machine, on several nodes, or as a job of a Ray cluster. The commands are train, nodes and submit.

torchrun.py     torchrun for the ranks of this machine
node_start.py   a node until its ranks may start: meets the others, is compared and checked
node.py         one node's part in a run on several
node_ray.py     its part of the run's Ray
elastic.py      torch's elastic rendezvous for them
head_store.py   the store at the head node, and how it is found
members.py      which nodes are here, in which order: pure
preflight.py    comparisons between nodes before the start
probe.py        the program that measures the network between them
ray_cluster.py  Rays that live as long as a run
driver.py       the program of a Ray job: one actor a trainer rank
job_server.py   a job of Ray's job server: submitted, followed, stopped
cluster_room.py whether a run fits into a cluster's nodes
included.py     the user's packages and modules that travel with a job
render.py       job files for Slurm and KubeRay
launcher.py     whether a launcher has started this process as a rank
stop_request.py which `stop` in a run's folder is a request to this run
exit_summary.py the last lines of a launcher whose run did not finish
connect.py      whether something listens at an address
scope.py        a run's processes, temporary files and sockets, and their end
processes.py    processes that end with the one that started them
machine.py      packages, memory, shared memory and disk of this machine
devices.py      which GPUs trainer ranks and replicas get
num_ranks.py    how many trainer ranks a run gets by default
"""
