"""vLLM's engine.

api.py           the engine's calls that differ between versions, and the plug-in's entry
requests.py      what it is asked, and what comes of it
stops.py         stop texts, looked for in the text that rewards see
arguments.py     which fields of its EngineArgs a config may set
outputs.py       tokens that wait in its engine core until their request ends, most of them past its scheduler
trace.py         one sequence, every tensor on the way kept
unwarmed.py      a worker that compiles kernels when they are needed
routing.py       which experts a response's tokens had
patches.py       what has no door in vLLM: changed in place, with reason, version and test
"""
