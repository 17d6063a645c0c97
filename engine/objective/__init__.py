"""The objective: rewards become advantages, logits become log-probs, both become a loss.

advantages.py  rewards become advantages (pure functions)
policy.py      the policy's loss of each token: clip, CISPO, SAPO, GMPO, DPPO (pure functions)
own.py         losses and advantages of the user's own, tried before a start
loss.py        log-probs, GRPO and SFT losses, weights for off-policy rollouts, KL and entropy terms (pure functions)
distillation.py  divergences from a teacher, with their gradients (pure functions)
entropy.py     the policy's entropy, for the log and for the loss
logits.py      log-probs, entropy and greedy match from logits, in chunks where there are many
token_losses.py  losses that a caller names, as sums over given positions
metrics.py     metrics of a step, and log-probs of a few samples, for the log
"""
