"""Teachers that are asked in the rollout: they score the tokens of samples that have ended, beside the rewards.

Each source of the data has its teacher, or all have one. A run that resumes scores again what its checkpoint has of samples.
Leaves out the models (served/) and what the scores are for (engine/objective/).

    teachers = Teachers(config, {"": model})
    scores = await teachers.score("", group_prompt, completions)      # of each sample, one TokenScores a branch
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bridge.generation import Completion, TokenScores
from megasync.episodes.task import EpisodeResult
from megasync.served.protocol import CALLS, RETRIES

if TYPE_CHECKING:
    from megasync.config.teacher_section import TeacherConfig
    from megasync.served.protocol import ServedModel


class Teachers:
    """Served teachers of one run; methods are called on the event loop. `models`: by the source of the data; "": all."""

    def __init__(self, teacher: TeacherConfig, models: Mapping[str, ServedModel]) -> None:
        self.models = models
        self.top_k = teacher.top_k if teacher.objective == "top_k" else 0
        self._reported = Counter[str]()

    async def score(
        self, source: str, prompt_ids: Sequence[int], done: Sequence[Completion | EpisodeResult]
    ) -> list[tuple[TokenScores, ...]]:
        """Scores of each sample, by branch, of the tokens behind its prompt."""
        branches = [branches_of(one, prompt_ids) for one in done]
        model = self.models.get(source) or self.models[""]
        asked = [ids for of_sample in branches for ids, _ in of_sample]
        found = iter(await model.prompt_log_probs(asked, self.top_k))
        return [tuple(next(found).behind(num_prompt) for _, num_prompt in of_sample) for of_sample in branches]

    def metrics(self) -> dict[str, float]:
        """Since the last call."""
        now = Counter[str]()
        for model in self.models.values():
            now.update(model.counts)
        new, self._reported = now - self._reported, now
        return {"teacher/requests": float(new[CALLS]), "teacher/retries": float(new[RETRIES])}

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in self.models.values()))


def branches_of(done: Completion | EpisodeResult, prompt_ids: Sequence[int]) -> list[tuple[list[int], int]]:
    """The tokens of a response, or of each branch of an episode, each with the length of its prompt."""
    if isinstance(done, EpisodeResult):
        return [(branch.token_ids.tolist(), branch.prompt_length) for branch in done.branches if not done.is_dropped]
    return [([*prompt_ids, *done.token_ids.tolist()], len(prompt_ids))]


def teacher_fields(scores: TokenScores | None) -> dict[str, Any]:
    """Fields of a Sample; {} without a teacher."""
    if scores is None:
        return {}
    return {
        "teacher_log_probs": scores.log_probs,
        "teacher_top_ids": scores.top_ids,
        "teacher_top_log_probs": scores.top_log_probs,
    }
