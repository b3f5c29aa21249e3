"""The Kubernetes side of the Cluster protocol. Apart from handlers and __main__ only this package
knows Kubernetes.
"""

from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.cluster import KubeCluster
from sluice_operator.cluster.kube.lease import Lease, elect

__all__ = ["Api", "KubeCluster", "Lease", "elect"]
