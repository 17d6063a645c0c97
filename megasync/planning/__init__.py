"""What a run will take, before it starts: memory of every process, seconds of a step, what fits and what would.

The numbers come from the engine's own code: its model is built on torch's meta device with the shapes of one rank, and one
micro-batch goes forward and backward through it while every storage that appears and goes is counted.

meta/          a rank's model chunks on the meta device, and one micro-batch through them
request.py     what is asked for: ranks and hardware (no torch)
shapes.py      what is known of a plan's model, layout and work (no torch)
memory.py      bytes of a trainer rank by part
replicas.py    bytes of a vLLM worker by part (no torch)
hardware.py    GPUs, and the measured shares of their speed in measured.json (no torch)
lengths.py     how long responses are (no torch)
version_log.py what sync.log takes (no torch)
cpu/           seconds of what was traced, on this machine's CPU
model_costs.py multiplications of a model's passes
generation.py  seconds of a batch's generation
seconds.py     seconds of a step and its parts
stages.py      a pipeline stage's memory, and what does not fit
make.py        all of it together: a Plan
remedies.py    the nearest change that fits, and the best layouts
text.py        a plan for the terminal
record.py      plan.json in a run's folder, and what came of it
"""
