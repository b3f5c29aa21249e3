"""An exception in one line, the same for the same cause so that it can be counted; and in full.

The line is like `KeyError: 'label' (reward.py:12)`.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import FrameType

LONGEST = 300
"""Characters of an exception's message that are shown."""
_OURS = frozenset(
    {
        "sluice",
        "sluice_cli",
        "sluice_client",
        "sluice_operator",
        "sluice_buffer",
        "sluice_rendezvous",
        "sluice_rollout",
        "sluice_trainer",
    }
)
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def cause(error: BaseException) -> str:
    """Its type, the first line of its message, and the file and line that raised it."""
    where = raised_at(error)
    return f"{type_and_message(error)} ({where})" if where else type_and_message(error)


def type_and_message(error: BaseException) -> str:
    """Its type and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    shortened = message if len(message) <= LONGEST else f"{message[:LONGEST]}..."
    return f"{type(error).__name__}: {shortened}" if shortened else type(error).__name__


def raised_at(error: BaseException) -> str:
    """`file.py:12`: the innermost line of a user's own code; without one the innermost."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return ""
    frame, line = next((one for one in reversed(frames) if _is_users(one[0])), frames[-1])
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def formatted_traceback(error: BaseException) -> str:
    """The traceback."""
    return "".join(traceback.format_exception(error)).rstrip()


def _is_users(frame: FrameType) -> bool:
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    return not (file.startswith(("<", *_LIBRARIES)) or module.partition(".")[0] in _OURS)


_LOST_PEER = (
    "Connection closed by peer",  # gloo, and torch's store
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",  # NCCL: ncclRemoteError
    "Socket closed",
)


def lost_peer(text: str) -> str:
    """The words by which a collective of torch.distributed tells that another rank is gone; empty:
    it does not.

    Whoever was killed has the reason; the others only notice.
    """
    return next((sign for sign in _LOST_PEER if sign in text), "")
