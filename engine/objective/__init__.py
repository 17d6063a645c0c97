"""The objective: rewards become advantages, logits become log-probs, both become a loss.

advantages.py  rewards become advantages (pure functions)
loss.py        log-probs, GRPO and SFT losses, weights for off-policy rollouts (pure functions)
entropy.py     the policy's entropy, for the log
logits.py      log-probs, entropy and greedy match from logits, in chunks where there are many
metrics.py     metrics of a step, and log-probs of a few samples, for the log
"""
