"""launch/test.sh: it fails where any of its parts does. Its set-up and its Python are stand-ins here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "launch" / "test.sh"
ANSWERS = '#!/bin/bash\necho "$2 ran"\n[ "$2" != "$FAILS" ]\n'
SET_UP = "PYTHON={folder}/python MEGASYNC_ROOT={folder} MEGASYNC_LANE=cpu\n"


@pytest.mark.parametrize("fails", ["ruff", "mypy", "pytest", "none of them"])
def test_the_exit_code_is_0_only_where_all_of_it_passed(tmp_path: Path, fails: str) -> None:
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "setup.sh").write_text(SET_UP.format(folder=tmp_path))
    (tmp_path / "python").write_text(ANSWERS)
    (tmp_path / "python").chmod(0o755)
    command, own = ["bash", str(tmp_path / "test.sh")], {"PATH": "/usr/bin:/bin", "FAILS": fails}
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert all(f"{part} ran" in done.stdout for part in ("ruff", "mypy", "pytest")), done.stdout + done.stderr
    assert (done.returncode == 0) == (fails == "none of them"), done.stdout + done.stderr
