"""What a sync carries, in which bytes, and how bytes are copied and proven whole. Knows no Megatron, no vLLM and no Ray.

manifest.py        the ordered list of tensors that a sync carries
bucket.py          tensors become fixed-size buckets and back (pure functions)
regions.py         tensor regions and the buffer regions that they are copied to or from (pure functions)
copies.py          the copies between memory and a bucket, on either side,
copy_kernel.py     and on CUDA
digest.py          the 64-bit digest of bytes
digest_kernel.py   the same on CUDA
"""
