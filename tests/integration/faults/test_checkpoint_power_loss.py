"""Power loss in the directory of checkpoints: each named one is whole, the newest is there."""

from __future__ import annotations

import random
from pathlib import Path

from sluice_trainer.checkpoint import checkpoint_directory as directory_of
from tests.integration.faults.disk import Disk, entries
from tests.integration.faults.native import recorded

CUTS = 150
TRAINER = """
import os, sys
from pathlib import Path
from sluice_trainer.checkpoint.checkpoint_directory import (
    Author, claim, commit, path_of, prune, temporary_of
)

directory, journal = Path(sys.argv[1]), Path(sys.argv[2])
for attempt in (1, 2):
    author = Author(attempt, "run")
    claim(directory, author)
    for step in range(10 * attempt, 10 * attempt + 6):
        final = path_of(directory, step)
        temporary = temporary_of(final, author)
        (temporary / "critic").mkdir(parents=True)
        for name in ("a.distcp", "critic/b.distcp", ".metadata"):
            (temporary / name).write_bytes(os.urandom(3000))
        commit(temporary, final, author)
        print(journal.stat().st_size, step)
        prune(directory, 2, author)
    (temporary_of(path_of(directory, step + 1), author)).mkdir()
"""


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    directory, journal = tmp_path / "checkpoints", tmp_path / "journal"
    directory.mkdir()
    disk = Disk(directory)
    output = recorded(journal, directory, TRAINER, str(directory), str(journal))
    committed = [tuple(map(int, line.split())) for line in output.splitlines()]
    written = list(entries(journal))
    draw, position = random.Random(7), 0
    for number, cut in enumerate(sorted(draw.choices([entry.end for entry in written], k=CUTS))):
        while position < len(written) and written[position].end <= cut:
            disk.feed(written[position])
            position += 1
        target = tmp_path / str(number)
        target.mkdir()
        disk.restore(target, draw)
        safe = max((step for end, step in committed if end <= cut), default=-1)
        present = directory_of.steps(target)
        assert max(present, default=-1) >= safe
        for step in present:
            final = directory_of.path_of(target, step)
            directory_of.verify(final, directory_of.manifest_files(final))
        directory_of.claim(target, directory_of.Author(3, "run"))
