"""The documents: links lead somewhere, pages and pictures made from code are up to date, commands and messages exist."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
import yaml

from docs.generate import pages as generated_pages

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCES = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPANS = re.compile(r"`[^`\n]*`")
FOLDERS = "megasync|engine|bridge|exact|bench|examples|tests|launch|configs|docs|locks"
NAMED_FILES = re.compile(rf"`((?:{FOLDERS})/[a-z\d_./-]*(?:/|\.\w+))`")
CONFIGS = re.compile(r"configs/\w+\.yaml")
MAX_PAGES, MAX_WORDS = 16, 20_000
GENERATED = ("reference.md", "metrics.md")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCES.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = SPANS.sub("", FENCES.sub("", (ROOT / page).read_text(encoding="utf-8")))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https:"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_named_files_exist(page: Path) -> None:
    named = NAMED_FILES.findall((ROOT / page).read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_written_pages_are_few_and_short() -> None:
    written = [page for page in PAGES if page.parent.name == "docs" and page.name not in GENERATED]
    assert len(written) <= MAX_PAGES
    assert sum(len((ROOT / page).read_text(encoding="utf-8").split()) for page in written) <= MAX_WORDS


def test_steps_beside_a_config_are_the_ones_that_it_takes() -> None:
    """Where a page gives the figures of a run, its command trains as many steps."""
    first_run = (ROOT / "README.md").read_text(encoding="utf-8").partition("## A first real run")[2].partition("\n## ")[0]
    named = [(config, "", steps) for config in CONFIGS.findall(first_run)[:1] for steps in re.findall(r"(\d+) steps", first_run)]
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        named += re.findall(r"`megasync train (configs/\w+\.yaml)([^`]*)`, (\d+) steps", text)
    assert len(named) > 1
    for config, overrides, steps in named:
        own = re.search(r"run\.steps=(\d+)", overrides)
        taken = own[1] if own else yaml.safe_load((ROOT / config).read_text())["run"]["steps"]
        assert int(taken) == int(steps), (config, overrides)


def test_every_page_is_in_the_sites_navigation() -> None:
    site = yaml.safe_load((ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8"))
    named = {page for entry in site["nav"] for value in entry.values() for page in pages_in(value)}
    assert named == {page.name for page in PAGES if page.parent.name == "docs"}


def pages_in(entry: str | list[dict[str, str]]) -> list[str]:
    return [entry] if isinstance(entry, str) else [page for inner in entry for page in inner.values()]


def test_generated_pages_are_those_of_the_code() -> None:
    """After a change of keys, metrics or advisories: python -m docs.generate"""
    for name, text in generated_pages().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, name


def test_pictures_are_those_of_their_code() -> None:
    for name, draw in runpy.run_path(str(ROOT / "docs/draw.py"))["PICTURES"].items():
        assert (ROOT / "docs/images" / name).read_text(encoding="utf-8") == draw()


def test_commands_in_documents_exist() -> None:
    blocks = "\n".join(block for page in PAGES for block in FENCES.findall((ROOT / page).read_text(encoding="utf-8")))
    modules = set(re.findall(r"python -m (megasync[\w.]*)", blocks))
    files = set(re.findall(r"(?:\./)?((?:launch|configs|docs)/[\w./-]+\.(?:sh|yaml|yml|py))", blocks))
    assert modules and files
    for module in modules:
        assert importlib.util.find_spec(module) is not None, module
    for file in files:
        assert (ROOT / file).is_file(), file


def test_messages_in_troubleshooting_are_the_programs() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page.partition("## It runs")[0], flags=re.MULTILINE)
    files = [path for room in ("engine", "bridge", "exact", "model_folder", "megasync") for path in (ROOT / room).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert len(messages) > 12
    assert [message for message in messages if message not in code] == []
