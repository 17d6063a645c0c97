"""A run on several nodes: the same command on each finds the others, checks them, and starts Ray and its share of the ranks.

The head node has the store through which all of it goes (torch's TCPStore) and decides; a member does what it reads there. A
round is one start of the ranks on a set of nodes: when a node is lost the next round waits for another. The ranks of a round are
torchrun's (launch/torchrun.py). Leaves out the cluster that somebody else has started (submit.py).

roll_call.py  who has come, who sits where, what is missing: pure
facts.py      what a node tells of itself: code, packages, config, files
compare.py    what differs between nodes, and what the figures of wire.py mean, in words: pure
store.py      JSON in the head's store, signs of life, and what it means when the head is silent
wire.py       the program that tries ports, clocks, an all-reduce and the bandwidth between nodes
ray_node.py   the node's part of the run's Ray
presence.py   who has come, who gives signs of life, who has left
head.py       the head's decisions: rounds, the check, the outcome
member.py     what each node does in a round
part.py       this node's part, from its arrival to the last word
command.py    the command: flags, and what is refused before anything starts
"""
