"""Models that are served beside the policy and never sync: teachers that score tokens, judges that answer.

protocol.py  ServedModel: what both forms do, and the errors of both
pool.py      a pool of replicas of a folder
endpoint.py  a server with vLLM's OpenAI API, by HTTP
"""
