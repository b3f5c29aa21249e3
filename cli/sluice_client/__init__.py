"""Jobs from Python: submit, watch, read, change. The same calls for a cluster and for this machine.

from sluice import Client

job = Client.local().submit("examples/quickstart/job.yaml")
job.wait()
job.metrics().plot(x="step", y="rollout/raw_reward")
"""

from sluice_client.client import Client, Job
from sluice_client.errors import ClientError, JobFailedError

__all__ = ["Client", "ClientError", "Job", "JobFailedError"]
