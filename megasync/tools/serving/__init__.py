"""The weights of runs and folders, served by replicas as in training, for evaluate, generate, replay and bisect.

source.py     which weights, as a folder, and the config to serve them by
replicas.py   replicas with the weights of a folder; a command's temporary folder and errors
send.py       the weights of other folders, sent to running replicas
options.py    options of evaluate and generate
answers.py    examples answered, scored and written
"""
