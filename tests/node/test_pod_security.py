"""A namespace that asks for the restricted standard, on a real node: what runs there,
and as whom.
"""

from __future__ import annotations

import warnings

import pytest

from tests.node.jobs import Quickstart
from tests.node.node import Node
from tests.pod_security import violations

pytestmark = pytest.mark.timeout(1200)
START_SECONDS = 300
ROLES = {"rendezvous": "rendezvous", "buffer": "buffer", "trainer": "trainer", "rollout": "worker"}
LABELS = (
    "pod-security.kubernetes.io/enforce=restricted",
    "pod-security.kubernetes.io/enforce-version=latest",
)
SANDBOX = """
from sluice.rewards.sandbox import Sandbox
sandbox = Sandbox()
print("layers:", sandbox.isolation)
print(sandbox.run(source="print(6 * 7)", input="", memory=1 << 30, cpu_seconds=10, seconds=20))
limits = {"memory": 1 << 30, "cpu_seconds": 10, "seconds": 20}
print(sandbox.run(source="open('/tmp/x', 'w')", input="", **limits).status)
sandbox.close()
"""


def test_the_quickstart_runs_restricted_and_so_does_the_sandbox_of_code(
    quickstart: Quickstart, node: Node
) -> None:
    node.kubectl("label", "namespace", quickstart.namespace, *LABELS)
    if not enforces(quickstart):
        warnings.warn(
            "this API server does not enforce the standard: its stored pods are checked",
            stacklevel=1,
        )
    quickstart.start(trainer={"steps": 60})
    quickstart.until_step(1, START_SECONDS)
    for pod in quickstart.pods():
        assert violations(pod, "restricted") == []
    for role, container in ROLES.items():
        status = inside(quickstart, role, container, "cat /proc/1/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(fields["Uid"].split()) == {"65532"}
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    layers, works, escapes = inside(
        quickstart, "rollout", "worker", f"python - <<'END'{SANDBOX}END"
    ).splitlines()[-3:]
    assert layers.endswith("seccomp")
    assert "status='ok', output='42\\n'" in works
    assert escapes == "error", "a file outside of the program's own directory"
    quickstart.until_state("Succeeded", START_SECONDS)


def enforces(run: Quickstart) -> bool:
    """True if the API server refuses a privileged pod in the run's namespace."""
    words = ("run", "probe", "--image=none", "--privileged", "--dry-run=server")
    return "PodSecurity" in run.kubectl(*words, check=False)


def inside(run: Quickstart, role: str, container: str, command: str) -> str:
    pod = run.pod(role)["metadata"]["name"]
    return run.kubectl("exec", pod, "-c", container, "--", "sh", "-c", command, seconds=120)
