"""An exception as one line, the same for the same cause so that it can be counted.

The line is like `KeyError: 'label' (reward.py:12)`. There is the full traceback as well.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import FrameType

# Most characters of an exception's message in the line.
LONGEST = 300
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
    """Return type and first line of the message, and the file and line that raised the error."""
    line = raised_at(error)
    return f"{type_and_message(error)} ({line})" if line else type_and_message(error)


def type_and_message(error: BaseException) -> str:
    """Return the type of the error and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    shortened = message if len(message) <= LONGEST else f"{message[:LONGEST]}..."
    return f"{type(error).__name__}: {shortened}" if shortened else type(error).__name__


def raised_at(error: BaseException) -> str:
    """Return `file.py:12`: the innermost line of user code, or else the innermost line."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return ""
    frame, line = next((item for item in reversed(frames) if _is_user_code(item[0])), frames[-1])
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def formatted_traceback(error: BaseException) -> str:
    """Return the traceback as text."""
    return "".join(traceback.format_exception(error)).rstrip()


def _is_user_code(frame: FrameType) -> bool:
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
    """Return the words by which torch.distributed reports that another rank is gone, or "".

    The rank that was killed has the reason; the others only notice its absence.
    """
    return next((sign for sign in _LOST_PEER if sign in text), "")
