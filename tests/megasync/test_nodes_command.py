"""What the command for several nodes refuses before it looks for any.

python -m pytest tests/megasync/test_nodes_command.py
"""

from __future__ import annotations

import pytest

from megasync.nodes import PORT, main, parse

COMMAND = ["configs/grpo_fsdp.yaml", "--nodes", "2"]


@pytest.mark.parametrize(("head", "port"), [("node1", PORT), ("node1:1", 1), ("node1:65535", 65535)])
def test_the_head_has_a_name_and_a_port(head: str, port: int) -> None:
    given = parse([*COMMAND, "--head", head])
    assert (given.host, given.port, given.wait_seconds) == ("node1", port, 600)


NO_NODES = ("-1", "a,", "a,,b", "")
NO_HEADS = ("n:0", "n:65536", "n:99999", "n:-1", "n:", "n:x", "n:\u00b2", ":5", "")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        *((["--head", head], f"--head {head}: HOST") for head in NO_HEADS),
        *((["--head", "n", f"--wait-seconds={number}"], f"--wait-seconds {number}: at least 0") for number in ("nan", "-1")),
        (["--head", "n", "--nodes", "0"], "--nodes 0: at least one"),
        *((["--head", "n", f"--nodes={names}"], f"--nodes {names}: a number, or host names") for names in NO_NODES),
    ],
)
def test_flags_out_of_range_are_refused_by_name(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*COMMAND, *flags])
    assert refused.value.code == 2 and said in capsys.readouterr().err
