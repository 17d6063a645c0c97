"""Tool calls in what a model wrote: read in the one way that there is, or reported as broken.

arguments.py    JSON read strictly, and text read as the type that a tool's schema wants
python_form.py  calls written as Python
cursor.py       a place in a text, and what can stand there
formats.py      the formats, a reader each
reading.py      all calls of a text, and what of it is no call

vLLM has a parser for each of these formats, made for servers: it makes a call out of the start of one that was cut off, takes the
last of two values of one key, and makes numbers of strings. `python -m tests.megasync.episodes.tool_table` prints how it and the
package renderers do beside this. To import it takes 11 s of a CPU and 540 MB, in each process of episodes.
"""
