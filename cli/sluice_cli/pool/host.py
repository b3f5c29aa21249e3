"""Keeps the engines of a pool running, as processes of this machine.

Engines are pods of a LocalCluster, made from the template that a cluster's StatefulSet has. The
planner's policy for gangs decides when an engine that has ended is started again. Each engine has a
Service, so it keeps its port and jobs find it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Never

from sluice.api import GangStatus, RLEnginePool, RoleName
from sluice.api.groups.lifecycle import FailurePolicy
from sluice.telemetry import steady
from sluice_operator.cluster.local import pools
from sluice_operator.cluster.local.cluster import LocalCluster
from sluice_operator.plan.decide.deletion import deletions
from sluice_operator.plan.decide.gangs import GangPlan, advance, of_gang
from sluice_operator.plan.decide.restart import GiveUp, Restart
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS
from sluice_operator.plan.facts.model import Gang, Images, KubeObject
from sluice_operator.plan.facts.podstate import headline
from sluice_operator.plan.manifests.engine_pool import key_secret, stateful_set

# Pauses before an engine starts again: 2 s, doubled with each failure in a row, at most a minute.
POLICY = FailurePolicy(rollout_backoff_seconds=2)
# The role of engines in a job, which the policy restarts without bound.
_ROLE: RoleName = "rollout"
_POLL_SECONDS = 1.0


class EngineGaveUpError(Exception):
    """An engine cannot start, and no further attempt would help. The message says why."""


class PoolHost:
    """The engines of one pool in a cluster of this process."""

    def __init__(
        self, pool: RLEnginePool, cluster: LocalCluster, say: Callable[[str], object]
    ) -> None:
        """Create a host whose engines are not started yet. say: prints a line for the user."""
        self.pool, self.cluster, self._say = pool, cluster, say
        self._gangs = [Gang(_ROLE, engine, 1) for engine in range(pool.spec.replicas)]
        self._statuses: dict[int, GangStatus] = {}
        self._ready: set[int] = set()
        self._announced = False

    async def run(self) -> Never:
        """Start the engines, and start each again that ends.

        Raises
        ------
        EngineGaveUpError
            An engine refuses its arguments.

        """
        services = [_service(self.pool, gang) for gang in self._gangs]
        await self.cluster.apply(self.pool, [key_secret(self.pool), *services])
        addresses = await self._announce_addresses()
        for gang, address in zip(self._gangs, addresses, strict=True):
            self._say(f"engine {gang.replica} starts at http://{address}, log: {self._log(gang)}")
        while True:
            await self._pass()
            await self.cluster.changed(_POLL_SECONDS)

    async def stop(self) -> None:
        """End all engines, and wait until they have ended."""
        while pods := (await self.cluster.observe(self.pool)).pods:
            await self.cluster.delete(self.pool, deletions(pods, steady.now()))
            await self.cluster.changed(_POLL_SECONDS)

    async def _announce_addresses(self) -> Sequence[str]:
        """Let jobs find the engines, which wait until they answer."""
        objects = (await self.cluster.observe(self.pool)).objects
        secret = objects["Secret", names.pool_key_name(self.pool)]
        addresses = [_address(objects["Service", _name(self.pool, gang)]) for gang in self._gangs]
        pools.write(self.pool, secret["stringData"][names.POOL_KEY], tuple(addresses))
        return addresses

    async def _pass(self) -> None:
        pods, now = (await self.cluster.observe(self.pool)).pods, steady.now()
        for gang in self._gangs:
            plan = advance(gang, self._statuses.get(gang.replica), of_gang(gang, pods), POLICY, now)
            self._statuses[gang.replica] = plan.status
            self._report(plan)
            await self.cluster.delete(self.pool, plan.delete)
            if plan.create:
                await self.cluster.apply(self.pool, [_pod(self.pool, gang, plan.status.attempt)])

    def _report(self, plan: GangPlan) -> None:
        engine, decision = plan.gang.replica, plan.decision
        if isinstance(decision, GiveUp):
            log = self._log(plan.gang)
            raise EngineGaveUpError(f"engine {engine}: {headline(decision.failure)}; log: {log}")
        if isinstance(decision, Restart):
            self._ready.discard(engine)
            cause = headline(decision.failure) if decision.failure else decision.disruption
            self._say(
                f"engine {engine} has ended, and starts again in {decision.delay:g} s: {cause}"
            )
        elif plan.facts.ready and engine not in self._ready:
            self._ready.add(engine)
            self._say(f"engine {engine} answers")
            self._say_how_to_use()

    def _say_how_to_use(self) -> None:
        """Say how jobs use the pool, once all engines have answered for the first time."""
        if self._announced or len(self._ready) < len(self._gangs):
            return
        self._announced = True
        name, spec = self.pool.metadata.name, self.pool.spec
        self._say(
            f"pool {name} is ready: {spec.model.path}, adapters up to rank {spec.max_rank}\n"
            f"jobs use it with rollout.pool: {name}, trainer.lora and weightSync: {{lora: adapter, "
            "pauseMode: versions}\n"
            f"Ctrl-C or sluice pool down {name} ends it"
        )

    def _log(self, gang: Gang) -> str:
        return str(self.cluster.logs_dir / f"{_name(self.pool, gang)}.engine.log")


def _name(pool: RLEnginePool, gang: Gang) -> str:
    """Return the name of an engine's pod and Service, which stays when it starts again."""
    return f"{names.pool_engine_name(pool.metadata.name)}-{gang.replica}"


def _labels(pool: RLEnginePool, gang: Gang) -> dict[str, str]:
    return names.selector(pool, gang.role) | {names.LABEL_REPLICA: str(gang.replica)}


def _service(pool: RLEnginePool, gang: Gang) -> KubeObject:
    """Return the Service that gives an engine a port of this machine."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(pool, _name(pool, gang)),
        "spec": {
            "selector": _labels(pool, gang),
            "ports": [{"name": "http", "port": names.PORTS["http"], "targetPort": "http"}],
        },
    }


def _address(service: KubeObject) -> str:
    return f"{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"


def _pod(pool: RLEnginePool, gang: Gang, attempt: int) -> KubeObject:
    """Return the pod of an engine, from the template of a cluster's StatefulSet."""
    template = stateful_set(pool, Images(), NO_DEFAULTS)["spec"]["template"]
    identity = _labels(pool, gang) | {names.LABEL_ATTEMPT: str(attempt), names.LABEL_INDEX: "0"}
    metadata = {"name": _name(pool, gang), "namespace": pool.metadata.namespace}
    labels = template["metadata"]["labels"] | identity
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": template["metadata"] | metadata | {"labels": labels},
        "spec": template["spec"],
    }
