"""The training engine: Megatron-Core models, wrapped, fed and stepped. Knows no Ray and no vLLM.

config.py      what the YAML keys `model`, `engine` and `algorithm` mean
device.py      the device that a rank computes on; stand_in.py lets megatron-core, megatron-fsdp and mbridge run without CUDA
megatron.py    what is used of megatron-core, imported once that is in place
parallel.py    process groups; gloo.py: those on CPUs share their threads
stages.py      which layers each stage of the pipeline has (pure functions); costs.py says what layers and attention cost
model.py       a Hugging Face folder becomes megatron-core model chunks, through mbridge; families.py, rope.py: how these differ
vocabulary.py  a vocabulary that tensor parallelism does not divide
experts.py     mixtures of experts in that; router.py chooses them, or takes those that a rollout had
windows.py     how many tokens each layer attends to; gemma.py: layers of Gemma 3
attention.py   core attention over packed sequences, and the sequence-parallel RMSNorm; flash.py has the kernels of GPUs
kernels.py     which libraries' kernels train: torch's own, and others' where they are installed
latent.py      multi-latent attention, with projections of its own
context.py     sequences that several ranks share
recompute.py   what the backward pass computes again
fused.py       rotary embedding and log-probs in one kernel each, with CUDA
lora.py        low-rank adapters on the frozen linears
peft.py        adapters to and from PEFT's folders; peft_folder.py says what a folder may be, without torch
wrap.py        the wrap table: `ddp` and `megatron_fsdp`; ddp_fields.py has the names of `overrides`, without torch
unshard.py     all-gathers Megatron-FSDP's shards, a transformer layer at a time
weights.py     typed weight items: what an export gets of a parameter
optimizer.py   Adam, clipping and the learning-rate schedule
sample.py      Sample: a prompt with a response, as arrays; batch.py packs them into balanced micro-batches (pure functions)
advantages.py  rewards become advantages (pure functions)
correction.py  ratios of two policies by token or sequence, weights for off-policy rollouts (pure functions)
outputs.py     what is read of the logits, in chunks where there are many
passes.py      micro-batches through the model, by megatron-core's schedule
loss.py        log-probs, GRPO and SFT losses (pure functions)
entropy.py     the policy's entropy, for the log
metrics.py     what a step reports
engine.py      Engine: prepare, update, whole_parameters
random_state.py  the states of all random generators, and going back to them
checkpoint/    save and resume: cut-off safe, in any layout, beside the training if wanted
memory.py      the setting of torch's allocator, and how much memory is in use
offload.py     parameters, gradients and optimizer state to host memory and back
"""
