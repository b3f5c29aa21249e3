"""Jobs from Python: submit, watch, read, change. The same calls for a cluster and for this machine.

from sluice import Client

job = Client.local().submit("examples/quickstart/job.yaml")
job.wait()
job.metrics().plot(x="step", y="rollout/raw_reward")

The command line uses the other modules of this package to find runs, to show a job's status and to
merge its logs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice_client.client import Client, Job, Pool
    from sluice_client.errors import ClientError, JobFailedError

__all__ = ["Client", "ClientError", "Job", "JobFailedError", "Pool"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: `sluice --help` needs no client."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "errors" if name.endswith("Error") else "client"
    return getattr(importlib.import_module(f"sluice_client.{module}"), name)
