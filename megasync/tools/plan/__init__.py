"""The memory of a run's processes and the seconds of its steps on GPUs, before it starts.

The engine's model is built on torch's meta device with the shapes of one rank, and one micro-batch goes forward and backward
through it while each storage that appears and goes is counted. Seconds follow from multiplications, bytes and constants.

meta/             a rank's model chunks on the meta device, and one micro-batch through them
layout.py         the request, the ranks' grid, and the work of a step (no torch)
lengths.py        lengths of prompts and responses (no torch)
hardware.py       GPUs, and the constants in measured.json (no torch)
memory.py         bytes of a trainer rank by part
replicas.py       bytes of a vLLM worker by part (no torch)
seconds.py        seconds of a step and its parts
make.py           a Plan of all of it
text.py           a plan for the terminal
run_comparison.py a plan beside a run's metrics
command.py        the command
"""
