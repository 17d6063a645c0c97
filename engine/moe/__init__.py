"""Mixtures of experts in the local layer spec.

experts.py      a layer's experts in grouped matrix products
router.py       chooses experts, or replays those of a rollout
router_bias.py  biases that balance the load of experts
"""
