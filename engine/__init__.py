"""The training engine: Megatron-Core models, wrapped, fed and stepped. Knows no Ray and no vLLM.

Each room imports only from those above it:

config.py     the YAML keys `model` and `engine`
algorithm.py  the YAML key `algorithm`
sample.py     Sample: a prompt with a response, as arrays
rules.py      compatibility of a model and a layout: used by the config check and by the engine (no torch)
resume.py     a checkpoint's index, and whether a run can resume from it (no torch)
runtime/      the device, megatron-core itself, process groups, random states
batch/        samples packed into balanced micro-batches
attention/    core attention over packed sequences, its kernels, contexts, rotary embedding
moe/          mixtures of experts: grouped products and routers
model/        a Hugging Face folder becomes megatron-core model chunks
wrap/         DDP or Megatron-FSDP, the optimizer, whole parameters out of both
peft/         adapters to and from PEFT's folders
objective/    advantages, log-probs, losses, metrics
minibatch.py  a batch's samples become mini-batches with advantages, packed for this rank
passes.py     micro-batches through the model, by megatron-core's schedule
criterion.py  the values read from logits and the loss of a mini-batch, by algorithm, own functions and teacher
teacher.py    a teacher's log-probs for micro-batches, by a model in the trainer
models.py     the policy with its adapters, and the frozen models beside it
offload.py    parameters, gradients and optimizer state to host memory and back
alike.py      whether all ranks start from the same model
engine.py     Engine: prepare, update, whole_parameters
adapters.py   adapters that take turns on one base model: state, files
shared.py     passes that several adapters share
driven.py     Driven: forward_backward and optim_step of several adapters, whose loop is the caller's
trace.py      one forward pass that records every intermediate tensor
checkpoint/   save and resume: cut-off safe, in any layout, beside the training if wanted
"""
