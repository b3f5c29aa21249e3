"""Suggest what to try after a failure, from the failure's reason, exit code and message."""

from __future__ import annotations

from pathlib import Path

from sluice.api import LastFailure
from sluice.api.groups.resources import less_memory, memory_field
from sluice_client.runs import RUNS
from sluice_operator.plan import KubeObject
from sluice_operator.plan.facts import podstate


def advice(failure: LastFailure, job: KubeObject, directory: Path | None) -> str:
    """Say what a user should try first.

    Parameters
    ----------
    failure
        The last failure that the job's status reports.
    job
        The RLJob, for its name and namespace.
    directory
        Run directory of a run of this machine; None for a job of a cluster.

    """
    logs = _logs_command(job, failure.role, directory)
    message = failure.message.lower()
    if failure.reason == "OOMKilled":
        return (
            "the container exceeded its memory limit; raise "
            f"{memory_field(failure.role, failure.container)}"
        )
    if failure.reason == podstate.OUT_OF_MACHINE:
        return (
            "the machine, or the container that sluice runs in, ran out of memory, and the kernel "
            f"killed the process; {less_memory(failure.container)}"
        )
    if failure.exit_code == 2:
        return (
            "a restart cannot fix a configuration error; correct what the last line names, and "
            "start the job again"
        )
    if "out of memory" in message and "cuda" in message:
        return (
            "the GPU ran out of memory; lower trainer.maxTokensPerGpu or "
            "rollout.engineArgs.memFractionStatic"
        )
    if failure.reason == "ProgressDeadlineExceeded":
        return f"the process hung; see what it did last with: {logs}"
    if failure.exit_code in (134, 136, 139):
        return f"native code crashed; see its trace with: {logs}"
    if failure.exit_code in (137, 143):
        return _advice_on_kill(failure, logs, on_cluster=directory is None)
    return f"see the whole log with: {logs}"


def _advice_on_kill(failure: LastFailure, logs: str, *, on_cluster: bool) -> str:
    """Advise on a container that SIGKILL or SIGTERM ended; the sender of a signal is unknown."""
    killed = failure.exit_code == 137
    if on_cluster:
        cause = (
            "the node ran out of memory, or someone killed the container (SIGKILL)"
            if killed
            else "someone stopped the container (SIGTERM)"
        )
        return f"{cause}; see why with: kubectl describe pod {failure.pod}"
    if not killed:
        return f"someone stopped the process (SIGTERM); see what it did last with: {logs}"
    return (
        "someone killed the process (SIGKILL), or the kernel did because memory ran out; look "
        f"with: sudo dmesg | grep 'Killed process'; and {less_memory(failure.container)}"
    )


def _logs_command(job: KubeObject, role: str, directory: Path | None) -> str:
    """Return the command that shows the logs of a role."""
    name, namespace = job["metadata"]["name"], job["metadata"].get("namespace")
    if directory is None:
        return f"sluice logs {name} {role}" + (f" -n {namespace}" if namespace else "")
    if directory.resolve() == (RUNS / name).resolve():
        return f"sluice logs {name} {role}"
    return f"sluice logs {role} --run-dir {directory}"
