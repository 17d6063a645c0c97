"""Example episodes and tools; run them from the folder of the clone. Only grpo_by_*.py need torch.

attempts.py            an episode: several attempts at a question of reasoning-gym
calculator.py          an episode of two turns: the quickstart's model asks a calculator for products
chat_calculator.py     the calculator as a tool in a chat: a small model with a chat template, and data
smollm2_calculator.py  an episode of two turns: SmolLM2 calls a calculator in a form given by an example
clients.py             episodes with the clients of OpenAI and Anthropic, and with an agent framework
hanoi.py               the Tower of Hanoi of reasoning-gym: an environment, data, and a small model
gyms.py                environments of skyrl-gym and reasoning-gym: data, and an episode
grpo_by_four_calls.py  GRPO on megasync.open: sample, forward_backward, optim_step
grpo_by_hand.py        GRPO in one file on the Python API: engine, replicas, weight bridge
sandbox.py             commands that isolate a Python program
python_tool.py         a tool that runs the model's Python code within limits
"""
