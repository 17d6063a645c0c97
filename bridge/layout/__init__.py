"""The content of a sync: tensors in buckets, the copies into and out of them, and digests. Knows no Megatron, no vLLM and no Ray.

manifest.py       the ordered list of tensors that a sync carries
quantised.py      which of them travel in FP8
bucket.py         tensors lie in fixed-size buckets: the SyncPlan of both sides (pure functions)
lanes.py          which rank sends which buckets to whom, where there are several hosts (pure functions)
regions.py        strided regions of memory and copies between them (pure functions)
plan.py           where a manifest's tensors go in a worker's parameters
shards.py         full tensors rebuilt from what workers hold
copies.py         copies between memory and a bucket, on either side,
copy_kernel.py    and on CUDA
digest.py         the 64-bit digest of bytes
digest_kernel.py  the same on CUDA
upload.py         small tables put on a GPU
words.py          a tensor's memory as numpy's numbers
splitmix.py       the pseudo-random numbers of digests, seeds and data order
"""
