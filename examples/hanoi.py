"""The Tower of Hanoi of reasoning-gym as a game: one move a turn, then the model sees the board. The package scores.

An environment with Gymnasium's interface for any chat model, with reasoning-gym's own questions; and warm-up data for a model of
1 M parameters, with random legal moves. Leaves out the puzzles and the score (data/reasoning_gym.py, which pip installs).

    python -m examples.hanoi --to FOLDER      # model, warm_up.jsonl, train.jsonl, held_out.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.calculator import write_lines
from examples.chat_calculator import ASSISTANT, USER, build_tokenizer, vocabulary_of, words_of
from megasync.data.reasoning_gym import generate_task, score
from megasync.tools.assets.small_qwen3 import EOS, write_small_qwen3

OPTIONS = {"min_disks": 2, "max_disks": 2, "min_pegs": 3, "max_pegs": 3}
NUM_ENTRIES, NUM_HELD_OUT = 100, 2  # drawn entries; only 6 are different
MAX_MOVES = 8
NUM_GAMES, WARM_UP_MOVES = 4000, 5  # of the warm-up data
MOVE = re.compile(r"Move disk (\d) from Peg (\d) to Peg (\d)")

Board = tuple[tuple[int, ...], ...]  # the disks of each peg, the lowest first


class Hanoi:
    """`task.extra["entry"]` is reasoning-gym's entry as JSON. An illegal move ends the game; the reward comes at the end."""

    def __init__(self, task: Any) -> None:
        self.entry, self.moves = json.loads(task.extra["entry"]), list[str]()

    def reset(self) -> str:
        return shown(*begin(self.entry["metadata"]))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        self.moves.append(action)
        board, target = begin(self.entry["metadata"])
        for move in self.moves:
            board = moved(board, move) or ()
        is_solved, is_over = board and board[target] == solved(self.entry["metadata"]), not board
        is_last = len(self.moves) == MAX_MOVES
        if not (is_solved or is_over or is_last):
            return shown(board, target), 0.0, False, False, {}
        reward = score("\n".join(self.moves), self.entry)
        return "", reward, bool(is_solved or is_over), is_last, {"solved": float(bool(is_solved))}

    def state(self) -> list[str]:
        return self.moves

    def set_state(self, state: list[str]) -> None:
        self.moves = state


def begin(puzzle: Mapping[str, Any]) -> tuple[Board, int]:
    """The board at the start, and the index of the target peg."""
    places = range(1, puzzle["num_pegs"] + 1)
    return tuple(solved(puzzle) if peg == puzzle["start_peg"] else () for peg in places), puzzle["target_peg"] - 1


def solved(puzzle: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(range(puzzle["num_disks"], 0, -1))


def shown(board: Board, target: int) -> str:
    """The board as text, such as 321/-/->3."""
    return "/".join("".join(map(str, peg)) or "-" for peg in board) + f">{target + 1}"


def legal(board: Board) -> Iterator[tuple[str, Board]]:
    """The legal moves, each with the board after it."""
    for source, disks in enumerate(board):
        for target, others in enumerate(board):
            if disks and source != target and (not others or others[-1] > disks[-1]):
                pegs = list(board)
                pegs[source], pegs[target] = disks[:-1], (*others, disks[-1])
                yield f"Move disk {disks[-1]} from Peg {source + 1} to Peg {target + 1}", tuple(pegs)


def moved(board: Board, move: str) -> Board | None:
    """The board after the move; None for an illegal move."""
    return dict(legal(board)).get(move.strip()) if MOVE.fullmatch(move.strip()) else None


def warm_up(question: str, puzzle: Mapping[str, Any], draw: random.Random) -> Iterator[dict[str, str]]:
    """The turns of one game as rendered prompts, each with a random legal move as the answer."""
    board, target = begin(puzzle)
    prompt = f"{USER}{question}{EOS}"
    for _ in range(WARM_UP_MOVES):
        move, after = draw.choice(list(legal(board)))
        prompt += f"{USER}{shown(board, target)}{EOS}{ASSISTANT}"
        yield {"question": prompt, "answer": move}
        prompt, board = f"{prompt}{move}{EOS}", after
        if board[target] == solved(puzzle):
            return


def lines(seed: int) -> dict[str, list[dict[str, str]]]:
    """The lines of each file; held-out puzzles are in no other file."""
    draw, (entries, _) = random.Random(seed), generate_task("tower_of_hanoi", OPTIONS, NUM_ENTRIES, 0, seed)
    puzzles = list({line["question"]: line for line in entries}.values())
    held_out, train = puzzles[:NUM_HELD_OUT], puzzles[NUM_HELD_OUT:]
    games = (train[number % len(train)] for number in range(NUM_GAMES))
    turns = [turn for line in games for turn in warm_up(line["question"], json.loads(line["entry"])["metadata"], draw)]
    return {"train": train, "held_out": held_out, "warm_up": turns}


def main(arguments: Sequence[str]) -> int:
    """Write model and data."""
    parser = argparse.ArgumentParser(prog="python -m examples.hanoi", description="The Tower of Hanoi, and a model.")
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--seed", default=0, type=int)
    given = parser.parse_args(arguments)
    files = lines(given.seed)
    words = words_of([part for line in files["train"] for part in (line["question"], *line["answer"].splitlines())])
    write_small_qwen3(given.to / "model", vocabulary_of(words), given.seed, "float32", max_position_embeddings=512)
    build_tokenizer(words).save_pretrained(given.to / "model")
    write_lines(given.to, files)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
