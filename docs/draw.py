"""Draws the documentation's pictures as SVG: `python docs/draw.py` writes them into docs/images/.

Rectangles, lines and text, with colours for light and dark pages. A test holds the files to this code.
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.sax.saxutils import escape

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2937; }
.small { font-size: 12px; fill: #4b5563; }
.halo { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
.title { font-weight: 600; }
.box { fill: #ffffff; stroke: #9ca3af; }
.zone { fill: #f3f4f6; stroke: none; }
.train { fill: #dbeafe; stroke: #3b82f6; }
.wire { fill: #fef3c7; stroke: #d97706; }
.serve { fill: #dcfce7; stroke: #16a34a; }
.reward { fill: #fae8ff; stroke: #a21caf; }
.arrow { stroke: #6b7280; stroke-width: 1.6; fill: none; }
.head { fill: #6b7280; }
.line { stroke: #3b82f6; stroke-width: 2; fill: none; }
.dot { fill: #16a34a; }
.grid { stroke: #e5e7eb; }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb; } .small { fill: #9ca3af; }
  .halo { stroke: #0d1117; }
  .box { fill: #111827; stroke: #6b7280; } .zone { fill: #1f2937; }
  .train { fill: #1e3a5f; } .wire { fill: #4a3510; } .serve { fill: #14401f; } .reward { fill: #4a1050; }
  .arrow { stroke: #9ca3af; } .head { fill: #9ca3af; } .grid { stroke: #374151; }
}
"""


class Picture:
    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="head" d="M0 0 10 5 0 10z"/></marker></defs>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str, title: str = "", *lines: str) -> None:
        self._parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
        first = y + height / 2 + 5 - 8.5 * len(lines)
        for index, line in enumerate((title, *lines) if title else lines):
            self.text(x + width / 2, first + 17 * index, line, "small" if index else "title")

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        self._parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>')

    def arrow(self, *points: tuple[float, float], words: str = "", at: tuple[float, float] | None = None) -> None:
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path class="arrow" d="{path}" marker-end="url(#head)"/>')
        if words and at is not None:
            self.text(*at, words, "small")

    def curve(self, points: list[tuple[float, float]], kind: str) -> None:
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self._parts.append(f'<path class="{kind}" d="{path}"/>')

    def dot(self, x: float, y: float, words: str) -> None:
        self._parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
        self.text(x, y - 11, words, "small halo")

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def processes() -> str:
    """Who talks to whom in a run."""
    picture = Picture(860, 330, "The processes of a run: trainer ranks, vLLM replicas, reward processes, and what goes between them")
    picture.box(10, 30, 300, 200, "zone")
    picture.text(160, 22, "trainer: torchrun or a Ray job", "title")
    for index in range(2):
        picture.box(30 + 140 * index, 50, 120, 70, "train", f"rank {index}", "Megatron-Core,", "FSDP or DDP")
    picture.box(30, 145, 260, 65, "train", "rank 0 also schedules", "groups, staleness, checkpoints")
    picture.box(550, 30, 300, 200, "zone")
    picture.text(700, 22, "vLLM replicas: Ray actors", "title")
    for index in range(2):
        picture.box(570 + 140 * index, 50, 120, 70, "serve", f"replica {index}", "our receiver", "inside vLLM")
    picture.box(570, 145, 260, 65, "serve", "each token with its log-prob", "and the version that made it")
    picture.box(330, 45, 200, 80, "wire", "weights, by buckets", "NCCL, CUDA IPC or", "shared memory; digests")
    picture.arrow((290, 85), (330, 85))
    picture.arrow((530, 85), (570, 85))
    picture.arrow((290, 165), (570, 165), words="prompts, in groups", at=(430, 158))
    picture.box(330, 255, 200, 60, "reward", "reward processes", "your function, no GPU")
    picture.arrow((700, 210), (700, 285), (530, 285), words="responses", at=(640, 278))
    picture.arrow((330, 285), (160, 285), (160, 210), words="samples with rewards", at=(240, 278))
    return picture.svg()


def sync() -> str:
    """How the steps of a sync overlap. Lengths are a sketch, not a measurement."""
    picture = Picture(860, 250, "A weight sync: gather and convert, pack, send and load overlap bucket by bucket")
    rows = (("gather, convert", "train", 0), ("pack, digest", "train", 1), ("send", "wire", 2), ("check, load", "serve", 3))
    for row, (name, kind, lag) in enumerate(rows):
        y = 50 + 40 * row
        picture.text(118, y + 20, name, "", "end")
        for bucket in range(5):
            picture.box(195 + 70 * (bucket + lag), y, 66, 30, kind, f"{bucket}")
    picture.box(130, 50, 55, 150, "box", "pause")
    picture.box(825 - 55, 50, 80, 150, "box", "commit,", "resume")
    picture.text(195, 35, "buckets of at most sync.bucket_bytes, through two fixed buffers a side", "small", "start")
    picture.arrow((130, 225), (850, 225), words="time", at=(490, 243))
    return picture.svg()


def learning() -> str:
    """The lines "real_run two-SEED" of docs/bench/benchmarks.jsonl: means of three seeds, sampled reward a step and greedy reward on held-out problems."""
    lines = (Path(__file__).parent / "bench" / "benchmarks.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [line for line in map(json.loads, lines) if line["case"].startswith("real_run two-")]
    picture = Picture(860, 300, "SmolLM2-135M-Instruct learns sums: held-out reward 0.21 to 0.75 in 150 steps, mean of three seeds")
    left, right, bottom, top = 60, 840, 250, 30

    def place(step: float, value: float) -> tuple[float, float]:
        return left + (right - left) * step / 150, bottom - (bottom - top) * value / 0.8

    for value in (0.0, 0.2, 0.4, 0.6, 0.8):
        picture.curve([place(0, value), place(150, value)], "grid")
        picture.text(left - 8, place(0, value)[1] + 4, f"{value:.1f}", "small", "end")
    rewards = zip(*([row[1] for row in run["steps"]] for run in runs), strict=True)
    picture.curve([place(step, sum(of_seeds) / len(runs)) for step, of_seeds in enumerate(rewards, 1)], "line")
    for of_seeds in zip(*(run["evaluations"] for run in runs), strict=True):
        step, reward = of_seeds[0][0], sum(each[1] for each in of_seeds) / len(runs)
        picture.dot(*place(step, reward), f"{reward:.2f}")
        picture.text(place(step, 0)[0], bottom + 20, str(step), "small")
    picture.text((left + right) / 2, bottom + 42, "step", "small")
    said = "means of three seeds; line: reward of sampled responses; dots: greedy reward on 256 held-out problems"
    picture.text(left, 20, said, "small", "start")
    return picture.svg()


PICTURES = {"learning.svg": learning, "processes.svg": processes, "sync.svg": sync}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / "images" / name).write_text(draw(), encoding="utf-8")
