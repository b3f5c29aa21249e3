"""Reasons, with the messages that belong to them, and the numbers of the policies.

A reason is for programs (`kubectl wait`, alerts), its message for people. They live side by side so
that they cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice.samples.episode_protocol import EPISODE, VERIFIER

EXIT_CONFIG_ERROR = 2
"""A container's exit code for a configuration error that no restart cures (docs/contracts.md)."""

EXIT_PEER_LOST = 3
"""A container's exit code where another pod of its gang was lost,
which has the reason (docs/contracts.md)."""

PEER_GRACE = 15
"""Seconds for which such an end waits for the other pod's own:
a kubelet tells of it some seconds later."""

SERVICE_BACKOFF = (1, 60)
"""Base and maximum back-off in seconds of all roles but rollout, which has
spec.failurePolicy.rolloutBackoff."""

STABLE_AFTER_BACKOFFS = 2
"""A gang that lived this many times its maximum back-off starts counting from nothing."""

DISRUPTION_DELAY = 1
"""Seconds before a disrupted gang's next attempt:
two controllers that fight over a pod must not spin."""

FORCE_DELETE_AFTER = 300
"""Seconds past its grace after which a pod on a dead node is removed without the node's word.

Attempts are fenced by their number, so that a partitioned pod can do no harm;
waiting for ever would.
"""

GRACE = {
    "trainer": 300,
    "rollout": 60,
    "buffer": 30,
    "rendezvous": 10,
    EPISODE: 5,
    VERIFIER: 5,
}
"""Seconds between SIGTERM and SIGKILL, where the template does not say
terminationGracePeriodSeconds.

A trainer ends after the step that it is in, with a checkpoint (and gets the timeout of an update on
top of this); a rollout worker ends its requests and gives its leases back, with what they have; the
buffer ends its calls and closes its database; the rendezvous has nothing to save.
"""

QUEUE_LOOK_SECONDS = 30
"""Pause between two questions to a queue why a job waits: its objects are not watched."""

GIVE_BACK_SECONDS = 60
"""Time that a queue may hold a job until the engines that it does not need give their places back.
"""

POOL_PATIENCE = 30
"""Seconds that a queue may hold all pods of a pool of episodes before the job counts as queued."""

SANDBOX_LOOK_SECONDS = 10
"""Pause between two looks at Sandboxes without a pod, and for their API where the cluster lacks it:
neither is watched."""

SANDBOX_PATIENCE = 30
"""Seconds that a Sandbox may be without a pod before the job tells of it."""

BROKEN_GRACE = 30
"""The same for what is left of a trainer gang that failed: its collectives hang,
so it cannot save anything."""

ENGINE_GRACE = 10
"""The same for an engine whose worker has ended: it has nothing to save, and may hang."""


@dataclass(frozen=True, slots=True)
class Reason:
    name: str
    message: str

    def text(self, **values: object) -> str:
        return self.message.format(**values)


# Running, from nothing to training
PENDING = Reason("PodsPending", "{ready} of {desired} pods are running{detail}")
STARTING = Reason("Starting", "pods are running; {waiting}")
UNREACHABLE = Reason("BufferUnreachable", "pods are running; the buffer does not answer yet")
RUNNING = Reason("Running", "training, with {ready} of {desired} pods running")
RESTARTING = Reason("Restarting", "waiting for {gangs}{detail}")
STOPPED = Reason("Stopped", "the job {state}")

HOPELESS_AFTER = 3
HOPELESS = (
    "the same end {times} times in a row, and no step yet: trying again will not help; mend what "
    "it says"
)
"""Of a start-up that fails of one cause alone. It is tried again all the same: the cause may lie
outside of the job."""
NO_SANDBOXES = Reason(
    "ApiMissing",
    "rollout.environment.sandbox: this cluster serves no Sandbox of agents.x-k8s.io/v1beta1 or "
    "v1alpha1, and nothing is started; install kubernetes-sigs' agent-sandbox, or leave the field "
    "out",
)
RECONCILE_FAILED = Reason(
    "ReconcileFailed",
    "the operator cannot go on with this job, of an error of its own: {cause}; its log has the "
    "whole of it, and it tries again. Please report it",
)
UNBEGUN = "nothing was started"

# Admitted
ADMITTED = Reason("Admitted", "no pod waits for a queue")
GATED = Reason("WaitingForQueue", "{pods} for admission by {queue}{detail}")
QUEUED = Reason("WaitingForQueue", "the job waits in a queue{detail}")
NOT_ADMITTED = Reason("NotRequested", "the job {state}")

# WeightsInSync
IN_SYNC = Reason("InSync", "all engines hold the newest weights")
OUT_OF_SYNC = Reason("EnginesBehind", "not every engine holds the newest weights yet{detail}")
NO_ENGINES = Reason("NoEngines", "no engine has joined")
SYNC_UNKNOWN = Reason("Unknown", "the rendezvous cannot be asked")

# Suspended
SUSPENDED = Reason("Suspended", "the job is suspended; what it has stored is kept")
RESUMED = Reason("Resumed", "the job goes on")

# The end
SUCCEEDED = Reason("TrainerSucceeded", "all trainer pods have done their work")
INVALID_CONFIGURATION = Reason("InvalidConfiguration", "{pod}: {headline}")
MAX_RESTARTS = Reason(
    "ReachedMaxRestarts", "the trainer failed after {restarts} restarts (maxRestarts): {headline}"
)
DEADLINE_EXCEEDED = Reason(
    "DeadlineExceeded", "the job ran for {seconds} s (activeDeadlineSeconds)"
)
QUEUE_TIMEOUT = Reason(
    "QueueTimeoutExceeded",
    "the job waited in a queue for {seconds} s (queueTimeoutSeconds){detail}",
)
STARTUP_DEADLINE = Reason(
    "StartupDeadlineExceeded", "no step within {seconds} s (startupDeadlineSeconds){detail}"
)

# Why a gang gets another attempt
HUNG = Reason(
    "ProgressDeadlineExceeded",
    "no step for {seconds} s (progressDeadlineSeconds); the last was {step}",
)
GANG_FAILED = Reason(
    "GangRestarting", "{gang} failed: {headline}; attempt {attempt} starts in {delay} s"
)
GANG_DISRUPTED = Reason("GangDisrupted", "{gang} was disrupted: {what}; attempt {attempt} follows")
SCALED = Reason("Scaled", "rollout replicas {old} -> {new}")
EXPIRED = Reason(
    "Expired", "finished for {seconds} s (ttlSecondsAfterFinished); the job is deleted"
)
FORCED = Reason(
    "PodForceDeleted",
    "{pod} did not end {seconds} s after its grace; removed without the node's word",
)
DEFAULTED = Reason(
    "DefaultsApplied", "the cluster's defaults, where the job says nothing: {fields}"
)
UNEXPECTED_END = Reason("UnexpectedEnd", "the container ended with exit code 0 while the job runs")
