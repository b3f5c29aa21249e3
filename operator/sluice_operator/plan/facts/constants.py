"""Reasons of conditions and events with their messages, and the numbers of the policies.

A reason is for programs (`kubectl wait`, alerts), its message for people. They are defined together
so that they cannot drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from sluice.samples.episode_protocol import EPISODE, VERIFIER

# -- exit codes of containers (docs/contracts.md)

# A configuration error that no restart cures.
EXIT_CONFIG_ERROR = 2
# Another pod of the gang was lost; that pod has the cause.
EXIT_PEER_LOST = 3

# -- restarts

# Seconds to wait for the end of the other pod, which its kubelet reports some seconds later.
PEER_GRACE = 15
# Base and maximum delay in seconds for all roles but rollout, which has
# spec.failurePolicy.rolloutBackoffSeconds.
SERVICE_BACKOFF = (1, 60)
# A gang that ran for this many times its maximum delay starts counting from 0 again.
STABLE_AFTER_BACKOFFS = 2
# Seconds before the next attempt of a disrupted gang: two controllers that fight over a pod must
# not spin.
DISRUPTION_DELAY = 1
# Failures in a row, with one cause and before the first step, after which people are told that
# further attempts will not help. The job still restarts, because the cause may be outside of it.
HOPELESS_AFTER = 3
HOPELESS = (
    "failed {times} times in a row in the same way, before the first step: further attempts will "
    "not help until the cause is fixed"
)

# -- grace periods

# Seconds between SIGTERM and SIGKILL, unless the template sets terminationGracePeriodSeconds.
GRACE = {
    # Ends after the present step, with a checkpoint. The timeout of a weight update comes on top.
    "trainer": 300,
    # Ends its requests and returns its leases, with what they have.
    "rollout": 60,
    # Ends its calls and closes its database.
    "buffer": 30,
    # Has no data to save.
    "rendezvous": 10,
    EPISODE: 5,
    VERIFIER: 5,
}
# For the remaining pods of a trainer gang that failed: its collectives hang, so it cannot save.
BROKEN_GRACE = 30
# For an engine whose worker has ended: it has no data to save, and may hang.
ENGINE_GRACE = 10
# Seconds after its grace period at which a pod on a dead node is deleted without waiting for the
# node. Attempts are fenced by their number, so a partitioned pod does no harm.
FORCE_DELETE_AFTER = 300

# -- queues and sandboxes

# Seconds between two looks at why a job waits in a queue, because a queue's objects are not
# watched.
QUEUE_LOOK_SECONDS = 30
# Seconds that a queue may hold a job before its further engines give their places back.
GIVE_BACK_SECONDS = 60
# Seconds that a queue may hold all pods of a warm pool before the job counts as queued.
POOL_PATIENCE = 30
# Seconds between two looks at Sandboxes without a pod, and for the Sandbox API if the cluster lacks
# it, because neither is watched.
SANDBOX_LOOK_SECONDS = 10
# Seconds between two looks at a pool that a job waits for.
POOL_LOOK_SECONDS = 10
# Seconds that a Sandbox may be without a pod before the job reports it.
SANDBOX_PATIENCE = 30


@dataclass(frozen=True, slots=True)
class Reason:
    name: str
    message: str

    def text(self, **values: object) -> str:
        return self.message.format(**values)


# -- Running, from the first pod to training

PENDING = Reason("PodsPending", "{ready} of {desired} pods are running{detail}")
STARTING = Reason("Starting", "pods are running; {waiting}")
UNREACHABLE = Reason("BufferUnreachable", "pods are running; the buffer does not answer yet")
RUNNING = Reason("Running", "training, with {ready} of {desired} pods running")
RESTARTING = Reason("Restarting", "waiting for {gangs}{detail}")
STOPPED = Reason("Stopped", "the job {state}")
NO_SANDBOXES = Reason(
    "ApiMissing",
    "rollout.environment.sandbox: this cluster does not serve Sandbox of agents.x-k8s.io/v1beta1 "
    "or v1alpha1, so the job is not started; install kubernetes-sigs' agent-sandbox, or remove the "
    "field",
)
# The cluster says what is wrong with the pool, and what to do.
POOL_UNUSABLE = Reason("PoolUnusable", "{problem}; the job starts no workers and no trainer")
RECONCILE_FAILED = Reason(
    "ReconcileFailed",
    "the operator has an internal error with this job and tries again: {cause}; its log has the "
    "details. Please report it",
)
UNBEGUN = "no pod has been created"

# -- Admitted

ADMITTED = Reason("Admitted", "no pod waits for a queue")
GATED = Reason("WaitingForQueue", "{pods} for admission by {queue}{detail}")
QUEUED = Reason("WaitingForQueue", "the job waits in a queue{detail}")
NOT_ADMITTED = Reason("NotRequested", "the job {state}")

# -- ModelFetched

FETCHED = Reason("Fetched", "{pods} pods have their files")
FETCHING = Reason("Fetching", "{done} of {pods} pods have their files{detail}")
FETCH_FAILED = Reason("FetchFailed", "{pod}: {cause}")

# -- Ready, of a pool

ENGINES_READY = Reason("EnginesReady", "{ready} of {desired} engines answer")
ENGINES_NOT_READY = Reason("EnginesNotReady", "{ready} of {desired} engines answer{detail}")
NO_REPLICAS = Reason("NoEngines", "spec.replicas is 0, so the jobs of the pool wait")
INVALID_POOL = Reason("InvalidSpec", "{problem}")
POOL_ENDS = Reason("Deleting", "the pool is being deleted{detail}")

# -- WeightsInSync

IN_SYNC = Reason("InSync", "all engines hold the newest weights")
OUT_OF_SYNC = Reason("EnginesBehind", "not every engine holds the newest weights yet{detail}")
NO_ENGINES = Reason("NoEngines", "no engine has joined")
SYNC_UNKNOWN = Reason("Unknown", "the rendezvous does not answer")

# -- Suspended

SUSPENDED = Reason("Suspended", "the job is suspended; its data and checkpoints are kept")
RESUMED = Reason("Resumed", "the job is resumed")

# -- the end of a job

SUCCEEDED = Reason("TrainerSucceeded", "all trainer pods have completed")
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

# -- events

HUNG = Reason(
    "ProgressDeadlineExceeded",
    "no step for {seconds} s (progressDeadlineSeconds); the last was {step}",
)
GANG_FAILED = Reason(
    "GangRestarting", "{gang} failed: {headline}; attempt {attempt} starts in {delay} s"
)
GANG_DISRUPTED = Reason("GangDisrupted", "{gang} was disrupted: {what}; attempt {attempt} follows")
SCALED = Reason("Scaled", "rollout replicas {old} -> {new}")
POOL_SCALED = Reason("Scaled", "engines {old} -> {new}")
POOL_CHANGED = Reason("EnginesReplaced", "the engines restart one after another with the new spec")
POOL_IN_USE = Reason(
    "DeletedInUse", "the pool is deleted while jobs use it, which then wait: {jobs}"
)
EXPIRED = Reason(
    "Expired", "the job ended {seconds} s ago (ttlSecondsAfterFinished) and is deleted"
)
FORCED = Reason(
    "PodForceDeleted",
    "{pod} did not end within {seconds} s after its grace period; it is deleted by force",
)
DEFAULTED = Reason("DefaultsApplied", "fields set by the cluster's defaults: {fields}")
UNEXPECTED_END = Reason("UnexpectedEnd", "the container ended with exit code 0 while the job runs")
