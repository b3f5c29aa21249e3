"""Clusters, on which pods run: the protocol, Kubernetes, and a laptop."""

from sluice_operator.cluster.local.cluster import LocalCluster
from sluice_operator.cluster.local.processes import OrphanError
from sluice_operator.cluster.local.run_state import RunDirectoryError
from sluice_operator.cluster.protocol import Cluster, InProcessCluster

__all__ = ["Cluster", "InProcessCluster", "LocalCluster", "OrphanError", "RunDirectoryError"]
