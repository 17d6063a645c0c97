"""What packing shared prefixes once would bring: tokens and operations of a batch, packed as now and as a tree. No torch in here.

A sequence is a list of pieces, each known by a name and of some tokens; what begins with the same pieces is shared. As a tree
each piece is computed once, and still attends to all before it. Leaves out who could train so: the engine packs sequences one by
one.

    flat, tree = costs_of(group_of(16, prompt=512, response=512))
    python -m megasync.bench.training.prefixes                          # the table of docs/agents.md, for the 3 B
    python -m megasync.bench.training.prefixes --run runs/agents/hanoi  # of what a run has recorded
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megasync.bench.training.flops import attention_flops, num_active_parameters
from megasync.episodes.task import Played
from megasync.hf.model_shape import SHAPES, Shapes
from megasync.rollouts.records import load_record, paths_of

SHAPE, OTHER = "3b", "30b-a3b"
Pieces = Sequence[tuple[Hashable, int]]


class Cost(NamedTuple):
    """`pairs`: of a token with itself or one before it, what causal attention looks at."""

    tokens: int = 0
    pairs: int = 0

    def flops(self, shapes: Shapes) -> int:
        """Forward and backward."""
        return 6 * num_active_parameters(shapes) * self.tokens + attention_flops(shapes, 0) * 2 * self.pairs


def costs_of(sequences: Iterable[Pieces]) -> tuple[Cost, Cost]:
    """One by one, and as a tree."""
    flat, tree, nodes = Cost(), Cost(), dict[tuple[int, Hashable], int]()
    for pieces in sequences:
        node = before = 0
        for name, length in pieces:
            cost = Cost(length, length * before + length * (length + 1) // 2)
            flat = Cost(flat.tokens + cost.tokens, flat.pairs + cost.pairs)
            if (node, name) not in nodes:
                nodes[node, name] = len(nodes) + 1
                tree = Cost(tree.tokens + cost.tokens, tree.pairs + cost.pairs)
            node, before = nodes[node, name], before + length
    return flat, tree


def group_of(members: int, prompt: int, response: int) -> list[Pieces]:
    """Samples of one turn."""
    return [[("prompt", prompt), (member, response)] for member in range(members)]


def dropped_thinking(members: int, turns: int, prompt: int, thinking: int, answer: int, given: int) -> list[Pieces]:
    """Each turn is a branch whose prompt has the answers before it without their thinking."""
    sequences: list[Pieces] = []
    for member in range(members):
        stem: list[tuple[Hashable, int]] = [("prompt", prompt)]
        for turn in range(turns):
            sequences.append([*stem, ((member, turn, "sampled"), thinking + answer)])
            stem.append(((member, turn, "kept"), answer + given))
    return sequences


def kept_thinking(members: int, turns: int, prompt: int, sampled: int, given: int) -> list[Pieces]:
    """One branch a member, which shares the prompt alone."""
    return group_of(members, prompt, turns * sampled + (turns - 1) * given)


def recorded(run_folder: Path) -> Iterator[list[Pieces]]:
    """Of each step's record, token by token."""
    for path in paths_of(run_folder).values():
        found: list[Pieces] = []
        for group in load_record(path).groups:
            for done in group.members.values():
                if isinstance(done, Played):
                    found += [[(token, 1) for token in branch.token_ids.tolist()] for branch in done.branches]
                else:
                    found.append([(token, 1) for token in (*group.request.prompt_ids, *done.token_ids.tolist())])
        yield found


CASES = {
    "group of 16, prompt 512, response 512": group_of(16, 512, 512),
    "group of 8, prompt 128, response 1024": group_of(8, 128, 1024),
    "group of 16, prompt 4096, response 512": group_of(16, 4096, 512),
    "group of 16, prompt 512, response 8192": group_of(16, 512, 8192),
    "8 turns in one branch, group of 8": kept_thinking(8, 8, 512, 512, 64),
    "8 turns, thinking dropped: 8 branches, one member": dropped_thinking(1, 8, 512, 400, 112, 64),
    "the same, group of 8": dropped_thinking(8, 8, 512, 400, 112, 64),
    "8 branches behind 4096 shared tokens": group_of(8, 4096, 512),
    "128 turns of 256 with 64 given, thinking of 192 dropped": dropped_thinking(1, 128, 512, 192, 64, 64),
}


def row(name: str, sequences: Iterable[Pieces]) -> str:
    """Of a table in Markdown: tokens both ways, the share that is shared, and by how much operations would be fewer."""
    flat, tree = costs_of(sequences)
    fewer = [flat.flops(SHAPES[shape]) / tree.flops(SHAPES[shape]) for shape in (SHAPE, OTHER)]
    share = 1 - tree.tokens / flat.tokens
    return f"| {name} | {flat.tokens} | {tree.tokens} | {share:.0%} | {fewer[0]:.2f} | {fewer[1]:.2f} |"


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m megasync.bench.training.prefixes", description="What a tree would bring.")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="a run's folder, whose recorded steps are added up")
    given = parser.parse_args(arguments)
    print(f"| | tokens | as a tree | shared | times fewer operations, {SHAPE} | {OTHER} |\n|---|---|---|---|---|---|")
    if given.run is None:
        for name, sequences in CASES.items():
            print(row(name, sequences))
    else:
        steps = list(recorded(given.run))
        if not steps:
            print(f"{given.run}: has no recorded steps; write rollout.record=all", file=sys.stderr)
            return 2
        print(row(f"{given.run.name}, {len(steps)} steps", ([((n, 0), 0), *one] for n, step in enumerate(steps) for one in step)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
