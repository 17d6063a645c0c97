"""Several attempts at a question of reasoning-gym: an episode for data that `python -m megasync assets --task NAME` writes.

After a wrong answer the model gets a message and may try again; each attempt after the first costs a part of the reward. It needs
a model with a chat template, and data.chat_template=true. Leaves out the questions (data/reasoning_gym.py). No torch in here.

    rollout: {episode: examples.attempts:episode, episode_max_turns: 3}
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from megasync.data.reasoning_gym import score

ATTEMPTS, COST = 3, 0.25
WRONG = "That is not right. Try again, and answer with the final number alone."


async def episode(task: Any, model: Any) -> float:
    """The score of the best answer, minus COST for each attempt before it; the generator's own function scores."""
    entry = json.loads(task.extra["entry"])
    messages: list[Any] = [{"role": role, "content": content} for role, content in task.turns or (("user", task.prompt),)]
    best = 0.0
    for attempt in range(ATTEMPTS):
        message = await model.chat(messages)
        found = await asyncio.to_thread(score, message.content, entry)
        best = max(best, found - COST * attempt)
        if found == 1.0:
            break
        messages += [message, {"role": "user", "content": WRONG}]
    return best
