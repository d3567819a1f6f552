"""Ten kills at random instants; tests/system/kill.py does two hundred."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_ten_kills_change_no_loss(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "system" / "kill.py"), "--times", "10"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 kills" in done.stdout
    assert "0 records differ" in done.stdout
