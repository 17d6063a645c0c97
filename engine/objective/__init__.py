"""What is trained: rewards become advantages, logits become log-probs, both become a loss.

advantages.py  rewards become advantages (pure functions)
loss.py        log-probs, GRPO and SFT losses, weights for off-policy rollouts (pure functions)
entropy.py     the policy's entropy, for the log
head.py        the output layer: its product, and reading its logits chunk by chunk
logits.py      log-probs, entropy and greedy match from logits, in chunks where there are many
metrics.py     what a step reports, and log-probs of a few samples, for the log
"""
