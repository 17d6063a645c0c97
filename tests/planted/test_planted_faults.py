"""The list of planted faults fits the code. Whether tests find them: `python -m tests.planted`."""

from __future__ import annotations

from collections import Counter

from tests.planted.faults import ROOT, read_faults


def test_each_fault_can_be_planted_and_its_tests_are_there() -> None:
    faults = read_faults()
    assert not [problem for fault in faults if (problem := fault.problem(ROOT))]
    assert not [name for name, count in Counter(fault.name for fault in faults).items() if count > 1]
    assert len(faults) >= 60 and all(fault.suffers and fault.old != fault.new for fault in faults)
