"""vLLM's engine.

api.py           the engine's calls that differ between versions, and the plug-in's entry
requests.py      requests to it, and their completions
stops.py         stop texts, looked for in the text that rewards see
arguments.py     which fields of its EngineArgs a config may set
speculation.py   drafts of tokens
outputs.py       tokens kept in its engine core until their request ends
trace.py         a forward pass that records every intermediate tensor
multicast.py     no fused all-reduce on hosts without NVLink multicast
text_alone.py    language models out of folders with vision layers
unwarmed.py      a worker that compiles kernels when they are needed
routing.py       which experts a response's tokens had
patches.py       replacements where vLLM has no option: with reason, version and test
"""
