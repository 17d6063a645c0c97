"""The weight bridge: from sharded Megatron parameters to running vLLM replicas, bucket by bucket, verified.

config.py          the dataclass of the YAML key `sync`, and what a replica is started with
manifest.py        the ordered list of tensors that a sync carries
export.py          megatron-core parameters become Hugging Face tensors, in layer order
gather.py          the parameters' values come together: shards gathered, adapters merged
trace.py           what a conversion copies where, recorded once
merge.py           adapters merged into their weights (pure functions)
merge_kernel.py    the same on CUDA
adapter.py         the adapters alone as what a sync carries
bucket.py          tensors become fixed-size buckets and back (pure functions)
messages.py        the typed messages and states of a sync
publish.py         Publisher: one sync as a transaction, on every trainer rank
connection.py      what all sides agree on before the first sync
ranks.py           what the trainer's ranks tell each other
source.py          what a sync sends
sender.py          one rank's pass over its weights: gather, pack, hand over, or drain
digest.py          the 64-bit digest of bytes
digest_kernel.py   the same on CUDA
shards.py          full tensors rebuilt from what workers hold
transport/         how bytes travel: shm, nccl, ipc
receiver.py        the receiving side inside each vLLM worker
unpack.py          buckets become parameters, or tensors
regions.py         parts of tensors as rows of elements (pure functions)
copies.py          the copies between memory and a bucket, on either side,
copy_kernel.py     and on CUDA
plan.py            which piece of a bucket belongs where in a worker's parameters
bake.py            a worker's plan, from its model's own loaders
vllm_adapter.py    adapters in a running vLLM
vllm_api.py        everything that depends on the vLLM version, but for
vllm_reload.py     vLLM's layer-wise reload,
vllm_experts.py    its fused experts, and
vllm_readback.py   what a vLLM worker holds, in Hugging Face names
replica.py         what runs in the Ray actor of one vLLM replica
output.py          what its processes write
processes.py       that they end with it, and leave nothing
actors.py          those actors: started, called, ended
pool.py            ReplicaPool: the replicas as rank 0 of the trainer sees them
"""
