"""Weight sync from several hosts to several hosts: measured between namespaces of one machine, simulated for clusters.

The script docs/bench/nodes.sh makes the namespaces and starts what is measured, docs/bench/gpus.sh what runs between GPUs; the
figures are in docs/scale.md.

receiver.py  a worker's side of a sync without vLLM: the bridge's own receiving code, in a process
pool.py      all receivers, as a Publisher sees replicas
rank.py      one trainer rank: the cases, round by round
lanes.py     `bench lanes`: one trainer rank of real Megatron on GPUs of one host, with receivers on the same GPUs
report.py    the tables
probe.py     what a small message waits on a link that is in use
simulate.py  the same plan of lanes with the figures of any links
simulation.py how its buckets are followed
"""
