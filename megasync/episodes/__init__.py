"""Episodes of many turns: sampled and given tokens, token for token. No torch in here.

segments.py   turns become training sequences: each sampled token once, with its log-prob and version
record.py     how turns were asked for and what environments answered, so that an episode resumes or is played again
messages.py   messages in OpenAI's form, made plain, and their keys
calls/        tool calls in sampled text, read by the format of its family
parse.py      sampled text as content, reasoning and tool calls
tokens.py     text to tokens, with marks in the text for tokens that are known already
template.py   a conversation as token ids, by the chat template of the model's folder; also by one that knows no tools
folding.py    conversations for chat templates that know no tools, or no system message
sampled.py    a prompt and its sampled answer
replies.py    the part of a sampled answer that a program gets
tool_clock.py the time that the tools of an episode take
chat.py       Model: the interface to the model for an episode
render.py     by the renderers package, for families that it knows; which of the two a model's folder gets
task.py       arguments and results of an episode
environments.py  environments in the Gymnasium manner, played turn by turn
resolve.py    `rollout.episode` becomes a function, checked and imported
exchange.py   payloads between the trainer and an episode in a worker
output.py     the first bytes of what a worker prints
program.py    the function of episode workers
pool.py       all episodes of a run, as rollouts use them
upstream_requests.py  a program's HTTP request
openai_form.py, anthropic_form.py  how the two protocols write it
proxy.py      the server: any program that speaks one of them, an episode by its key
"""
