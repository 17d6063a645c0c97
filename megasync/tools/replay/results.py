"""The results of each step, and the lines and the JSON object that a command prints of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

MAX_SHOWN, MAX_STEPS = 5, 20
TextOf = Callable[[Sequence[int]], str]  # of token ids


@dataclass
class StepResult:
    """One step's result. `later_tokens`: sampled after an update within a turn, over keys and values of the weights before it,
    and so never compared. `without_weights`: tokens by version, whose weights are not there.
    """

    step: int
    episodes: int
    tokens_by_version: dict[int, int]  # that can be compared
    later_tokens: int
    compared_tokens: int = 0
    largest_gap: float = 0.0  # of log-probs
    without_weights: dict[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of sampled tokens."""
        return sum(self.tokens_by_version.values()) + self.later_tokens

    @property
    def is_same(self) -> bool:
        raise NotImplementedError

    def lines(self, text_of: TextOf) -> list[str]:
        """Lines about the compared tokens."""
        raise NotImplementedError

    def leave_out(self, compared: Iterable[int]) -> None:
        """Count the tokens of all versions but these."""
        others = self.tokens_by_version.keys() - set(compared)
        self.without_weights = {version: self.tokens_by_version[version] for version in sorted(others)}

    def not_compared(self) -> list[str]:
        left_out = [f"{self.later_tokens} tokens after an update in the midst of a turn"] if self.later_tokens else []
        without = self.without_weights.items()
        left_out += [f"{number} tokens of version {version}, whose weights are not there" for version, number in without]
        return [f"  not compared: {'; '.join(left_out)}"] if left_out else []


def counted(versions: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(versions).items()))


def as_json(run: Path, done: Sequence[StepResult], unreadable: Mapping[int, str]) -> str:
    steps = [{**asdict(each), "tokens": each.tokens} for each in done]
    same = all(each.is_same for each in done)
    return json.dumps({"run": str(run), "same": same, "unreadable": unreadable, "steps": steps}, indent=2)


def as_lines(done: Sequence[StepResult], unreadable: Mapping[int, str], text_of: TextOf) -> list[str]:
    found = [line for each in done for line in (*each.lines(text_of), *each.not_compared())]
    steps = [str(each.step) for each in done if each.without_weights and not each.compared_tokens]
    if steps:
        listed = ", ".join(steps[:MAX_STEPS]) + (" ..." if len(steps) > MAX_STEPS else "")
        found.append(f"not compared: {len(steps)} of {len(done)} steps, whose weights are not there: {listed}")
    found += [f"version {version} cannot be read: {reason}" for version, reason in list(unreadable.items())[:MAX_SHOWN]]
    more = len(unreadable) - MAX_SHOWN
    return [*found, *([f"... and {more} more versions"] if more > 0 else [])]
