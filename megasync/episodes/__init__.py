"""Episodes of many turns: what was sampled and what was given, token for token. No torch in here.

segments.py   turns become training sequences: each sampled token once, with its log-prob and version
record.py     how turns were asked for and what environments answered, so that an episode goes on or is played again
messages.py   messages in OpenAI's form, made plain, and by what one is known again
calls/        tool calls in what a model sampled, read by the format of its family
parse.py      what a model sampled, read as content, reasoning and tool calls
tokens.py     text to tokens, with marks in the text for tokens that are known already
template.py   a conversation as token ids, by the chat template of the model's folder; also by one that knows no tools
replies.py    what of a sampled answer a program gets
tool_clock.py how long the tools of an episode take
chat.py       Model: what an episode talks to
render.py     by the renderers package, for families that it knows; which of the two a model's folder gets
task.py       what an episode gets and gives back
environments.py  environments in the Gymnasium manner, played turn by turn
resolve.py    `rollout.episode` becomes a function, checked and imported
children.py   the processes that an episode starts, and what it prints
wire.py       what travels between the trainer and the processes of episodes
keeper.py     the parent of such a process: no program outlives it
program.py    the program of such a process
remote.py     where a process runs: beside the trainer, or in an actor on another node
running.py    an episode that has not ended, its clock, and what is known of its process
pool.py       the processes: who runs where, limits on time, who is to blame for an end
asking.py     what a program asks for over HTTP
openai_form.py, anthropic_form.py  how the two protocols write it
proxy.py      the server: any program that speaks one of them, an episode by its key
"""
