"""The Cluster protocol on Kubernetes.

Only this package, `handlers` and `__main__` know Kubernetes.
"""

from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.cluster import KubeCluster
from sluice_operator.cluster.kube.lease import Lease, elect

__all__ = ["Api", "KubeCluster", "Lease", "elect"]
