"""The parts of sluice that every room shares: the API, the wire, data, rewards, engines.

Here are also the names that a user imports: `from sluice import Client, RLJob`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.api import RLJob
    from sluice_client import Client, ClientError, Job, JobFailedError

__version__ = "0.1.0"
"""Of the distribution `sluice-rl`."""
__all__ = ["Client", "ClientError", "Job", "JobFailedError", "RLJob", "__version__"]


def __getattr__(name: str) -> Any:
    """Load what is asked for: pods import this package, and need no client."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        importlib.import_module("sluice.api" if name == "RLJob" else "sluice_client"), name
    )
