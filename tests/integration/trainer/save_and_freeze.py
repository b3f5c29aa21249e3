"""Child process.

Attempt 1 of a trainer, which stops itself in the middle of its first checkpoint.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from sluice_trainer.checkpoint.checkpoint_directory import Author
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointError
from sluice_trainer.megatron.policy import MegatronPolicy
from tests.integration.trainer import tiny

model, checkpoints, where = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


write, rename = filesystem_async._write_item, Path.rename
written = 0


@functools.wraps(write)
def write_and_freeze(*arguments: Any, **options: Any) -> Any:
    global written
    written += 1
    if where == "in a file" and written == 3:
        freeze()
    return write(*arguments, **options)


def freeze_and_rename(self: Path, target: Any) -> Any:
    if where == "at the rename":
        freeze()
    return rename(self, target)


filesystem_async._write_item = write_and_freeze
timeout = timedelta(seconds=tiny.TIMEOUT)
policy = MegatronPolicy(tiny.spec(model), model_dir=model, timeout=timeout, author=Author(1))
policy.load_latest(checkpoints)
shard = tiny.batch(8, seed=0)
policy.train([shard], [tiny.totals(shard)])
Path.rename = freeze_and_rename  # type: ignore[method-assign]
try:
    tiny.save(policy, checkpoints, 1)
except CheckpointError as error:
    print(error, flush=True)
    sys.exit(1)
