"""Whether this machine, and what a config names, is fit for a run: what `megasync doctor` looks at.

Each check takes what it looks at (texts, numbers, folders, an environment) as arguments, so that a test can hand it a broken
machine; examine.py hands over this one. Nothing stays written. torch is imported in subprocesses alone.

finding.py      what a check says: ok, warning or error, what was seen, the remedy
needs.py        what a config needs of a machine, in bytes, ranks and GPUs
packages.py     Python, packages beside their lock, the wrong apex, vLLM's plug-in
gpus.py         GPUs as nvidia-smi lists them: driver, memory, links
probe.py        the program of such a process
limits.py       ulimits, control groups, memory, threads
storage.py      /dev/shm, disk, folders, clock
network.py      loopback, ports, proxies; NCCL and gloo between two processes
environment.py  environment variables that change what a run does
leftovers.py    a Ray of others, and what former runs left
inputs.py       config, model folder, data, reward
examine.py      all of them, on this machine
"""
