"""Whether this machine, and the files that a config names, are fit for a run: the checks of `megasync doctor`.

Each check takes values (texts, numbers, an environment) and returns findings (launch/machine.py), so that a test can describe a
broken machine; examine.py reads this machine's. Nothing stays written. torch is imported in a subprocess alone.

gpus.py         driver, visible GPUs, memory that other processes hold, processes of a run whose launcher is gone
system.py       open files, disk, the run's folder
network.py      loopback, ports, proxies; NCCL and gloo between two processes
probe.py        the program that those processes run
software.py     packages and their lock, the wrong apex, vLLM's plug-in
environment.py  environment variables that change what a run does
inputs.py       config, model folder, data, reward
examine.py      all of them, on this machine
command.py      the command
"""
