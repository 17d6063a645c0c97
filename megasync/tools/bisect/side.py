"""The tensors that one side computed of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from megasync.tools.bisect.response import Response

TRAINER, REPLICA = "trainer", "replica"


@dataclass(frozen=True)
class Side:
    """`tensors` by site: rows are of `positions` [T], increasing; of `lm_head` and `log_probs` of the response's tokens.

    `earlier`: keys and values of the positions before, by site, that a prefix cache had; else {}. They were computed in another
    pass and rounded differently: `spread` is how far the keys and values of two passes differ, by site [groups, size].
    `other_earlier`: the other side's keys and values of the same positions.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    positions: torch.Tensor
    token_ids: torch.Tensor  # int64, of the whole sequence
    num_prompt: int
    earlier: dict[str, torch.Tensor] = field(default_factory=dict)
    spread: dict[str, torch.Tensor] = field(default_factory=dict)
    other_earlier: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, tensors: dict[str, torch.Tensor], response: Response, first: int = 0) -> Side:
        """`first`: the position of the first row."""
        device = next(iter(tensors.values())).device
        ids = torch.tensor(response.ids, device=device)
        return cls(name, tensors, torch.arange(first, len(ids) - 1, device=device), ids, len(response.prompt_ids))

    def __getitem__(self, site: str) -> torch.Tensor:
        return self.tensors[site]

    def double(self, site: str) -> torch.Tensor:
        return self.tensors[site].double()

    def with_earlier(self, site: str) -> torch.Tensor:
        """float64, of all positions from 0 on."""
        own = self.double(site)
        return own if site not in self.earlier else torch.cat([self.earlier[site].double().to(own), own])

    def rows(self, rows: slice) -> Side:
        """These rows of `lm_head` and `log_probs`, with the hidden states that they are computed from."""
        first = len(self.positions) - len(self.tensors["log_probs"])
        of_rows = {name: self.tensors[name][rows] for name in ("lm_head", "log_probs")}
        return replace(self, tensors={**of_rows, "model.norm": self.tensors["model.norm"][first:][rows]})
