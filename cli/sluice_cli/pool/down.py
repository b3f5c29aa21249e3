"""`sluice pool down`: end the process that runs a pool."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from sluice.api import ManifestError
from sluice_operator.cluster.local import pools

# Engines get some seconds to end; then their host kills them.
END_SECONDS = 60.0
_POLL_SECONDS = 0.1


def end_pool(name: str) -> str:
    """End a pool, and return what was done.

    Raises ManifestError if no pool of this name runs, or if it does not end.
    """
    pool = pools.read(name)
    if pool is None:
        raise ManifestError(
            f"no pool {name} runs on this machine; sluice pool list shows those that do"
        )
    with contextlib.suppress(ProcessLookupError):
        os.kill(pool.pid, signal.SIGTERM)
    end = time.monotonic() + END_SECONDS
    while pools.is_running(name):
        if time.monotonic() > end:
            raise ManifestError(
                f"pool {name} has not ended after {END_SECONDS:.0f} s: end process {pool.pid}"
            )
        time.sleep(_POLL_SECONDS)
    return f"pool {name} has ended"
