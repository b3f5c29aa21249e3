"""Exit codes of the command line, the same for every command."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The number that a shell sees."""

    DONE = 0
    FAILED = 1
    INVALID = 2
    STOPPED = 130


MEANING = {
    Exit.DONE: "done; with `sluice run`: the job succeeded",
    Exit.FAILED: "the job failed; what was asked for cannot be read; `sluice data inspect`: there "
    "are rows that cannot be used",
    Exit.INVALID: "nothing was begun: the manifest, an option or a file is wrong, and the message "
    "says where",
    Exit.STOPPED: "`sluice run` was stopped (Ctrl-C, SIGTERM); the same command goes on from there",
}
