"""The parts of sluice that all programs share: the API, the wire, data, rewards, engines.

Users import these names from here: `from sluice import Client, RLJob`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.api import RLJob
    from sluice_client import Client, ClientError, Job, JobFailedError, Pool

# Version of the distribution `sluice-rl`.
__version__ = "0.1.0"
__all__ = ["Client", "ClientError", "Job", "JobFailedError", "Pool", "RLJob", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: pods import this package, and need no client."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        importlib.import_module("sluice.api" if name == "RLJob" else "sluice_client"), name
    )
