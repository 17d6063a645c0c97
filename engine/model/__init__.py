"""A Hugging Face folder becomes megatron-core model chunks.

build.py       through mbridge, with our local layer spec
load.py        a folder's tensors into their parameters
families/      differences between model families; bridges of families that mbridge lacks
stages.py      which layers each stage of the pipeline has (pure functions, no torch)
vocabulary.py  a vocabulary that tensor parallelism does not divide
recompute.py   what the backward pass computes again
exact.py       the layers under model.exact
head.py        the output layer: its product, and reading its logits chunk by chunk
lora_linears.py  linears with a low-rank adapter
lora.py        adapters of a model: built, kept, shown, trained
"""
