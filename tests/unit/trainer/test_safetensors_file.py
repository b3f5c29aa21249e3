"""Files of weights have the permissions that the umask allows."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sluice_trainer.model import safetensors_file


@pytest.mark.parametrize(
    ("umask", "mode"),
    [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)],
    ids=["umask 022", "umask 027", "umask 077"],
)
def test_a_file_has_the_permissions_of_any_new_file(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        safetensors_file.save({"weight": torch.ones(3)}, path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
    assert load_file(path)["weight"].tolist() == [1.0, 1.0, 1.0]


def test_an_existing_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"of an attempt that was killed")
    path.chmod(0o664)
    safetensors_file.save({"weight": torch.zeros(2)}, path)
    assert path.stat().st_mode & 0o777 == 0o664
    assert load_file(path)["weight"].tolist() == [0.0, 0.0]


UNREADABLE = """
import os, sys
from pathlib import Path
from sluice_trainer.model.huggingface_files import reader
if not os.geteuid():
    os.setuid(65534)  # root may read everything
try:
    with reader(Path(sys.argv[1])) as read:
        read("weight", (3,))
except Exception as error:
    print(error)
"""


def test_an_unreadable_file_is_not_reported_as_missing() -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's are closed to other users
        path = Path(directory, "model.safetensors")
        safetensors_file.save({"weight": torch.ones(3)}, path)
        os.chmod(directory, 0o755)
        path.chmod(0o000)
        words = [sys.executable, "-c", UNREADABLE, directory]
        shown = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert f"{path}: user " in shown.stdout, shown.stderr[-2000:]
    assert "may not read it: chmod a+r" in shown.stdout
