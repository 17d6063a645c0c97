"""Model chunks are wrapped: gradients are reduced and sharded, parameters updated and made whole for an export.

table.py       the wrap table: `ddp` and `megatron_fsdp`
ddp_fields.py  which fields of megatron-core's DDP config `engine.overrides` may set (no torch)
kernels.py     which libraries' kernels train: torch's own, and others' where they are installed
optimizer.py   Adam, clipping and the learning-rate schedule
items.py       typed weight items, an export's view of a parameter
unshard.py     all-gathers Megatron-FSDP's shards, a transformer layer at a time
"""
