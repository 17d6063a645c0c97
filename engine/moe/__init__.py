"""Mixtures of experts in the local layer spec.

experts.py      a layer's experts in grouped matrix products
router.py       chooses experts, or takes those that a rollout had
router_bias.py  biases that balance the load of experts
"""
