"""Exit codes, the same for every command."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit code of a command."""

    DONE = 0
    FAILED = 1
    INVALID = 2
    STOPPED = 130


MEANING = {
    Exit.DONE: "done; `sluice run`: the job succeeded",
    Exit.FAILED: "the job failed, or cannot be read; `sluice data inspect`: some rows are unusable",
    Exit.INVALID: "the manifest, an option or a file is wrong; nothing was started",
    Exit.STOPPED: "`sluice run` was stopped (Ctrl-C, SIGTERM); the same command continues the run",
}
