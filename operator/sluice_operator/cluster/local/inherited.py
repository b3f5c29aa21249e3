"""Variables that containers on a laptop get from the process that hosts them."""

from __future__ import annotations

import os

_LOOPBACK = "lo"
COLLECTIVES = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}
"""Everybody of a run is on this machine. gloo and NCCL, left to themselves, listen on its network.
"""

NVLINK = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""On one machine ranks open each other's memory without these. Containers and virtual machines
often show GPUs whose fabric manager they cannot reach, and there NCCL's own choice ends with an
error. The host's environment goes first."""


def inherited_env() -> dict[str, str]:
    """The host's environment, but for the variables of a job that the host itself may
    be part of.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    unbuffered = {
        "PYTHONUNBUFFERED": "1"
    }  # a log that lags behind cannot tell why its process died
    return NVLINK | env | COLLECTIVES | unbuffered
