"""Takes the documentation's screenshots of the report: `python docs/screenshots.py RUN OTHER [AGENTS]` writes PNGs to docs/images/.

Needs Chromium on PATH (Debian: `apt-get install chromium`). RUN is shown alone, light, dark and on a telephone; both are compared.
Of AGENTS, a run of episodes, samples are shown. Pages are written to a temporary folder; the runs' folders are left as they are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megasync.report.page import write_comparison

IMAGES = Path(__file__).parent / "images"
LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"
ONLY = "<style>.tiles, .advisories, .foot, section:not(#timeline):not(#samples) { display: none }</style></head>"
NARROW = '<body style="margin: 0"><iframe src="one.html" style="border: 0; width: 390px; height: 1420px"></iframe></body>'
SHOTS = {  # name: (page, width, height, colours)
    "report_light.png": ("one", 1280, 1420, LIGHT),
    "report_dark.png": ("one", 1280, 1420, DARK),
    "report_narrow.png": ("narrow", 390, 1420, LIGHT),
    "report_samples.png": ("part", 1280, 1420, LIGHT),
    "report_comparison.png": ("both", 1280, 1420, LIGHT),
}
TURNS = {"report_turns.png": ("turns", 1280, 760, LIGHT)}
SAMPLES = ONLY.replace("#timeline):not(#samples", "#samples")


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the documentation's screenshots of the report.")
    for name, nargs in (("run", None), ("other", None), ("agents", "*")):
        parser.add_argument(name, type=Path, nargs=nargs, metavar=name.upper(), help="a run's folder")
    given = parser.parse_args()
    run, other, agents = given.run, given.other, given.agents
    chromium = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if chromium is None:
        sys.exit("no chromium on PATH: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        pages = {name: Path(folder) / f"{name}.html" for name in ("one", "part", "narrow", "both")}
        write_comparison([run], pages["one"])
        write_comparison([run, other], pages["both"])
        pages["part"].write_text(pages["one"].read_text(encoding="utf-8").replace("</head>", ONLY, 1), encoding="utf-8")
        pages["narrow"].write_text(NARROW, encoding="utf-8")  # headless Chromium begins with a window of 500 pixels
        if agents:
            pages["turns"] = Path(folder) / "turns.html"
            write_comparison(agents, pages["turns"])
            pages["turns"].write_text(pages["turns"].read_text(encoding="utf-8").replace("</head>", SAMPLES, 1), encoding="utf-8")
        for name, (page, width, height, colours) in (SHOTS | (TURNS if agents else {})).items():
            flags = [f"--window-size={width},{height}", colours, f"--user-data-dir={folder}/profile", "--headless=new", "--disable-gpu"]
            flags += ["--no-sandbox"] if os.geteuid() == 0 else []
            flags += ["--hide-scrollbars", "--virtual-time-budget=8000", f"--screenshot={IMAGES / name}"]
            subprocess.run([chromium, *flags, f"file://{pages[page]}"], check=True, capture_output=True)
            print(IMAGES / name, (IMAGES / name).stat().st_size)


if __name__ == "__main__":
    main()
