"""Where pods run: the Cluster protocol, and the laptop's implementation of it."""

from sluice_operator.cluster.local import LocalCluster
from sluice_operator.cluster.processes import OrphanError
from sluice_operator.cluster.protocol import Cluster, Host
from sluice_operator.cluster.rundir import RunDirectoryError

__all__ = ["Cluster", "Host", "LocalCluster", "OrphanError", "RunDirectoryError"]
