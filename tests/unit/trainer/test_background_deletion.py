"""Old checkpoints are deleted in the background."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from structlog.testing import capture_logs

from sluice_trainer.checkpoint.background_deletion import BackgroundDeletion


def test_a_failed_deletion_is_logged_and_the_next_one_goes_on(tmp_path: Path) -> None:
    no_directory, old = tmp_path / "file", tmp_path / "old"
    no_directory.touch()
    old.mkdir()
    deletion = BackgroundDeletion()
    with capture_logs() as entries:
        deletion.add(no_directory)
        deletion.add(old)
        deletion._thread.shutdown(wait=True)
    assert not old.exists()
    assert [entry["log_level"] for entry in entries] == ["warning"]
    assert str(no_directory) in entries[0]["event"]


def test_a_process_ends_after_its_deletions(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"old/{number}").mkdir(parents=True)
    program = (
        "import sys; from pathlib import Path; "
        "from sluice_trainer.checkpoint.background_deletion import BackgroundDeletion; "
        "BackgroundDeletion().add(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "old"], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []
