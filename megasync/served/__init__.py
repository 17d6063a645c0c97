"""Models that are served beside the policy and never sync: teachers that score tokens, judges that answer.

protocol.py  ServedModel: the methods and errors of both forms
pool.py      a pool of replicas of a folder
endpoint.py  a server with vLLM's OpenAI API, by HTTP
"""
