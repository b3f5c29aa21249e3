"""Decides what an RLEnginePool needs: its objects, its status and its events.

The StatefulSet's controller starts, replaces and numbers the engines. A pool has no end and no
attempts: a container that ends is started again by its kubelet, and the jobs send their adapters
once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sluice.api import LastFailure, RLEnginePool, RLEnginePoolStatus
from sluice.api.pool import PoolCondition
from sluice_operator.plan.decide.deletion import deletions, exit_times
from sluice_operator.plan.facts import clock, names, podstate
from sluice_operator.plan.facts.constants import (
    ENGINES_NOT_READY,
    ENGINES_READY,
    INVALID_POOL,
    NO_REPLICAS,
    POOL_CHANGED,
    POOL_ENDS,
    POOL_IN_USE,
    POOL_SCALED,
    Reason,
)
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS, JobDefaults
from sluice_operator.plan.facts.model import (
    Deletion,
    Event,
    Images,
    KubeletWarning,
    KubeObject,
)
from sluice_operator.plan.manifests import network
from sluice_operator.plan.manifests.engine_pool import pool_objects
from sluice_operator.plan.manifests.optional_objects import (
    DISRUPTION_BUDGET,
    covers,
    pool_budget,
)
from sluice_operator.plan.report.blocked import blocked
from sluice_operator.plan.report.events import of_deletions

_LONGEST_NOTE = 2048


@dataclass(frozen=True, slots=True)
class PoolObserved:
    """A pool's objects as the cluster reports them."""

    pods: tuple[KubeObject, ...] = ()
    # Objects that the pool owns, except pods, by (kind, name).
    objects: Mapping[tuple[str, str], KubeObject] = field(default_factory=dict)
    absent_kinds: frozenset[str] = frozenset()  # kinds that this cluster does not serve
    operator_namespace: str | None = None
    warned: Mapping[str, KubeletWarning] = field(default_factory=dict)  # by pod name
    defaults: JobDefaults = NO_DEFAULTS
    jobs: tuple[str, ...] = ()  # names of the unfinished jobs that use the pool
    tokens_per_second: float | None = None  # None if no engine was asked twice
    # A problem that is not seen in the objects, such as a refusal of the API server.
    note: str = ""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The work of one pass, in this order: status, deletions, creations, events.

    requeue_after: seconds after which the plan may change although the cluster does not.
    """

    status: RLEnginePoolStatus
    create: tuple[KubeObject, ...] = ()
    delete: tuple[Deletion, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None


def plan_pool(
    pool: RLEnginePool, observed: PoolObserved, now: datetime, images: Images
) -> PoolPlan:
    """Decide the work of one pass.

    Parameters
    ----------
    pool
        The pool, with the stored status.
    observed
        Its objects.
    now
        The time of this pass.
    images
        Container images.

    """
    if _is_ending(pool):
        status = _status(pool, observed, _ending(observed), now)
        return PoolPlan(status, events=_events_of_end(pool, observed))
    status = _status(pool, observed, _readiness(pool, observed, now), now)
    changed, stuck = _missing(pool, observed, images), _stuck(observed, now)
    events = (
        *_events_of_changes(observed, changed),
        *_events_of_readiness(pool, status),
        *of_deletions(stuck),
    )
    due = clock.until_next(exit_times(observed.pods), now)
    return PoolPlan(status, changed, (*_unwanted(pool, observed), *stuck), events, due)


def invalid_status(
    stored: KubeObject, problem: str, now: datetime
) -> tuple[RLEnginePoolStatus, Event]:
    """Return the status and the event of a pool whose spec breaks a rule; its engines stay."""
    before = RLEnginePoolStatus.model_validate(stored.get("status") or {})
    generation = stored["metadata"].get("generation", 1)
    content = ("False", INVALID_POOL.name, problem)
    condition = _condition(before, content, generation, now)
    update = {"observed_generation": generation, "conditions": [condition]}
    return before.model_copy(update=update), Event("Warning", INVALID_POOL.name, problem)


def deleted_in_use(jobs: Sequence[str]) -> Event:
    return Event("Warning", POOL_IN_USE.name, POOL_IN_USE.text(jobs=", ".join(jobs)))


# -- objects


def extra_keys(pool: RLEnginePool) -> tuple[tuple[str, str], ...]:
    """Return (kind, name) of the objects that a pool may have or lack."""
    return (
        (DISRUPTION_BUDGET, names.pool_engine_name(pool.metadata.name)),
        (network.KIND, names.engines_name(pool)),
    )


def _extras(pool: RLEnginePool, observed: PoolObserved) -> list[KubeObject]:
    optional = pool_budget(pool), network.pool_network_policy(pool, observed.operator_namespace)
    return [
        manifest
        for manifest in optional
        if manifest is not None and manifest["kind"] not in observed.absent_kinds
    ]


def _missing(pool: RLEnginePool, observed: PoolObserved, images: Images) -> tuple[KubeObject, ...]:
    """Return the objects that do not exist or differ from the spec."""
    desired = [*pool_objects(pool, images, observed.defaults), *_extras(pool, observed)]
    return tuple(manifest for manifest in desired if not _is_current(manifest, observed))


def _is_current(desired: KubeObject, observed: PoolObserved) -> bool:
    stored = observed.objects.get((desired["kind"], desired["metadata"]["name"]))
    if stored is None or desired["kind"] == "Secret":
        return stored is not None
    if desired["kind"] == "StatefulSet":
        hash_ = desired["metadata"]["annotations"][names.SPEC_HASH]
        same_replicas: bool = stored["spec"].get("replicas") == desired["spec"]["replicas"]
        return same_replicas and _hash_of(stored) == hash_
    return covers(stored, desired["spec"], "spec")


def _hash_of(stored: KubeObject) -> str:
    annotations: dict[str, str] = stored["metadata"].get("annotations") or {}
    return annotations.get(names.SPEC_HASH, "")


def _unwanted(pool: RLEnginePool, observed: PoolObserved) -> tuple[Deletion, ...]:
    wanted = {
        (manifest["kind"], manifest["metadata"]["name"]) for manifest in _extras(pool, observed)
    }
    return tuple(
        Deletion(kind, name)
        for kind, name in extra_keys(pool)
        if (kind, name) in observed.objects and (kind, name) not in wanted
    )


def _stuck(observed: PoolObserved, now: datetime) -> tuple[Deletion, ...]:
    """Delete pods by force that do not end, because their nodes are dead.

    The StatefulSet's controller replaces a pod only once it is gone, because it cannot know that
    an engine has no state.
    """
    leaving = [pod for pod in observed.pods if podstate.is_terminating(pod)]
    return deletions(leaving, now)


# -- status

# The status, the reason and the message of the condition Ready.
_Content = tuple[str, str, str]


def _status(
    pool: RLEnginePool, observed: PoolObserved, content: _Content, now: datetime
) -> RLEnginePoolStatus:
    before, generation = pool.status or RLEnginePoolStatus(), pool.metadata.generation
    status, reason, message = content
    if observed.note:
        message = f"{message}; {observed.note[:_LONGEST_NOTE]}"
    condition = _condition(before, (status, reason, message), generation, now)
    ready, rate = _ready(observed), observed.tokens_per_second
    return RLEnginePoolStatus(
        observed_generation=generation,
        conditions=[condition],
        engines=f"{ready}/{pool.spec.replicas}",
        replicas=sum(not podstate.is_terminating(pod) for pod in observed.pods),
        ready_replicas=ready,
        selector=names.selector_text(names.selector(pool, names.ENGINE)),
        jobs=len(observed.jobs),
        tokens_per_second="" if rate is None else f"{rate:.0f}",
    )


def _condition(
    before: RLEnginePoolStatus, content: _Content, generation: int, now: datetime
) -> PoolCondition:
    status, reason, message = content
    old = _stored_condition(before)
    same = old is not None and old.status == status
    return PoolCondition(
        type="Ready",
        status=status,
        reason=reason,
        message=message,
        last_transition_time=old.last_transition_time if old and same else clock.text(now),
        observed_generation=generation,
    )


def _stored_condition(status: RLEnginePoolStatus | None) -> PoolCondition | None:
    return next(iter(status.conditions), None) if status else None


def _ready(observed: PoolObserved) -> int:
    return sum(map(podstate.is_ready, observed.pods))


def _readiness(pool: RLEnginePool, observed: PoolObserved, now: datetime) -> _Content:
    ready, desired = _ready(observed), pool.spec.replicas
    if desired == 0:
        return "False", NO_REPLICAS.name, NO_REPLICAS.message
    if ready >= desired:
        return _content("True", ENGINES_READY, ready=ready, desired=desired)
    cause = _cause(observed, now)
    detail = f"; {cause}" if cause else ""
    return _content("False", ENGINES_NOT_READY, ready=ready, desired=desired, detail=detail)


def _content(status: str, reason: Reason, **values: object) -> _Content:
    return status, reason.name, reason.text(**values)


def _is_ending(pool: RLEnginePool) -> bool:
    return bool((pool.metadata.model_extra or {}).get("deletionTimestamp"))


def _ending(observed: PoolObserved) -> _Content:
    detail = f"; unfinished jobs use it: {', '.join(observed.jobs)}" if observed.jobs else ""
    return _content("False", POOL_ENDS, detail=detail)


# -- causes


def _cause(observed: PoolObserved, now: datetime) -> str:
    """Return why engines do not answer: the newest end of a container, or what blocks a pod."""
    unready = [pod for pod in observed.pods if not podstate.is_ready(pod)]
    failures = [failure for pod in unready for failure in podstate.last_failures(pod, now)]
    if failures:
        newest = max(failures, key=lambda failure: clock.parse(failure.time))
        return f"{newest.pod}: {_headline(newest)}"
    if obstacle := blocked(unready, observed.warned):
        return obstacle.text()
    gated = next((pod for pod in unready if podstate.is_gated(pod)), None)
    if gated is None:
        return ""
    queue = podstate.queue(gated)
    by = f"the queue {queue}" if queue else ", ".join(podstate.gates(gated))
    return f"{podstate.name(gated)} waits for admission by {by}"


def _headline(failure: LastFailure) -> str:
    if failure.reason == "OOMKilled":
        return (
            f"{failure.container}: OOMKilled; it used more memory than its limit: raise "
            "spec.resources.limits.memory"
        )
    return podstate.headline(failure)


# -- events


def _events_of_end(pool: RLEnginePool, observed: PoolObserved) -> tuple[Event, ...]:
    before = _stored_condition(pool.status)
    told = before is not None and before.reason == POOL_ENDS.name
    return (deleted_in_use(observed.jobs),) if observed.jobs and not told else ()


def _events_of_changes(observed: PoolObserved, changed: Sequence[KubeObject]) -> Iterator[Event]:
    """Yield events of engines that are added, removed or replaced."""
    for manifest in changed:
        stored = observed.objects.get((manifest["kind"], manifest["metadata"]["name"]))
        if manifest["kind"] != "StatefulSet" or stored is None:
            continue
        old, new = stored["spec"].get("replicas"), manifest["spec"]["replicas"]
        if old != new:
            yield Event("Normal", POOL_SCALED.name, POOL_SCALED.text(old=old, new=new))
        if _hash_of(stored) != _hash_of(manifest):
            yield Event("Normal", POOL_CHANGED.name, POOL_CHANGED.message)


def _events_of_readiness(pool: RLEnginePool, status: RLEnginePoolStatus) -> Iterator[Event]:
    """Yield an event if the engines have become ready or not, or fail for another cause."""
    before, after = _stored_condition(pool.status), _stored_condition(status)
    assert after is not None
    if before is None or (before.status, before.message) == (after.status, after.message):
        return
    if after.status == "True":
        if before.status != "True":
            yield Event("Normal", after.reason, after.message)
        return
    # After a change of the spec engines are expected to start.
    lost = before.status == "True" and before.observed_generation == after.observed_generation
    cause = _detail(after.message)
    if lost or (cause and cause != _detail(before.message)):
        # Without a cause an engine may be replaced, as after a change of the template.
        yield Event("Warning" if cause else "Normal", after.reason, after.message)


def _detail(message: str) -> str:
    return message.partition("; ")[2]
