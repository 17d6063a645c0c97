"""Notes of a replica's processes are found in what they write."""

from __future__ import annotations

from bridge.notes import find_notes, note


def test_notes_are_found_among_other_lines_each_once(capfd) -> None:
    note("one thing")
    note("another")
    note("one thing")
    written = capfd.readouterr().err
    output = "INFO 01-01 nothing\n" + "\n".join(f"(EngineCore pid=7) {line}" for line in written.splitlines()) + "\nWARNING"
    assert find_notes(output) == ["one thing", "another"]
    assert find_notes("nothing\n") == []
