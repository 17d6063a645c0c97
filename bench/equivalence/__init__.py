"""`python -m bench equivalence`: every family in every layout against one rank, transformers, its folder and vLLM.

cases.py     a case's config, and why the config's own check refuses it
models.py    tiny models of each family (tables.yaml), and what transformers computes with them
measure.py   what a case's ranks do: steps, log-probs, exports
ranks.py     ranks that run one case after another, and the next start when one fails
read_back.py weights that vLLM gives back
judge.py     differences, whether they are within bounds, and the tables in Markdown
run.py       all of it
"""
