"""Containers of a rollout pod: the engine, sluice's worker, and the user's OpenEnv server.

A job that uses a pool has workers alone; the engines are pods of the pool.
"""

from __future__ import annotations

from sluice.api import RLJob
from sluice.engines import engine_of
from sluice.engines.protocol import Plugin, ServerPlacement
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.merge import merge
from sluice_operator.plan.facts.model import Gang, Images, PoolFacts
from sluice_operator.plan.manifests import resource_claims, volumes
from sluice_operator.plan.manifests.containers import (
    Env,
    container,
    port_env,
    secret_variable,
    security,
    variables,
)
from sluice_operator.plan.manifests.resources import Container, of_spec
from sluice_operator.plan.manifests.volume_paths import draft_path, model_path


def rollout_containers(
    job: RLJob,
    gang: Gang,
    attempt: int,
    index: int,
    common: Env,
    token: Env,
    images: Images,
    pool: PoolFacts | None,
) -> list[Container]:
    """Return the engine's container, and on the engine's first pod the worker's.

    An engine is foreign code, so it does not get the job's token. With a pool there is the worker
    alone.

    Parameters
    ----------
    job, gang, attempt, index
        Which pod the containers belong to.
    common
        Variables of all containers of the pod.
    token
        Variables with the job's token.
    images
        Container images.
    pool
        The pool of the job's engines; None if the job starts them itself.

    """
    if job.spec.uses_pool:
        assert pool is not None
        url = f"http://{pool.addresses[gang.replica]}"
        return [_worker(job, common, token + pool_credential(job), url, images)]
    engine = _engine(job, gang, attempt, common, images)
    if index > 0:
        return [engine]
    ports = port_env({"http": names.PORTS["http"], "master": names.PORTS["master"]})
    url = "http://127.0.0.1:$(SLUICE_PORT_HTTP)"
    return [engine, _worker(job, common, token + ports, url, images)]


def _engine(job: RLJob, gang: Gang, attempt: int, common: Env, images: Images) -> Container:
    launch = engine_of(job.spec).launch
    ports = {"http": names.PORTS["http"], "master": names.PORTS["master"]}
    settings = launch.env(job.spec)
    if job.spec.kernel_cache is not None:
        settings = settings | launch.caches(names.CACHE_DIR)
    env = common + port_env({"metrics": names.PORTS["metrics"]}) + variables(settings)
    mounts = volumes.mounts(job, "rollout")
    if plugin := launch.plugin(job.spec):
        mounts = [*mounts, volumes.plugin_mount(plugin) | {"readOnly": True}]
    image = images.of_engine(job.spec.rollout.engine)
    engine = container(job, "engine", image, launch.command(job.spec), env, ports, mounts)
    engine["args"] = launch.args(job.spec, _place(job, gang, attempt))
    engine["resources"] = merge(
        resource_claims.gpus(job, gang), of_spec(job.spec.rollout.resources)
    )
    return engine


def _worker(job: RLJob, common: Env, own_env: Env, url: str, images: Images) -> Container:
    """Return the worker's container. url: that of its engine."""
    env = common + own_env + variables({"SLUICE_ENGINE_URL": url})
    own = {"metrics": names.PORTS["metrics"]}
    if job.spec.rollout.has_episode_pods:
        own |= {"gateway": names.PORTS["gateway"]}
        env += variables({"SLUICE_EPISODES": "pods"})
        env += secret_variable(names.episode_token_name(job), "SLUICE_EPISODE_TOKEN")
    if job.spec.weight_sync.store is not None:
        env += variables({"SLUICE_WEIGHTS_DIR": names.WEIGHTS_DIR})
    command = ["python", "-m", "sluice_rollout"]
    # The worker runs the user's code, which must not change the kernels that the engine executes.
    mounts = [
        mount for mount in volumes.mounts(job, "rollout") if mount["mountPath"] != names.CACHE_DIR
    ]
    worker = container(
        job, "worker", images.rollout, command, env, own, mounts + volumes.tls_mount(job)
    )
    return worker | {"resources": of_spec(job.spec.rollout.worker_resources)}


def pool_credential(job: RLJob) -> Env:
    """Return the variable with which a container calls the engines of the job's pool."""
    if not job.spec.uses_pool:
        return []
    return secret_variable(names.pool_credential_name(job), "SLUICE_POOL_CREDENTIAL")


def plugin_of(job: RLJob) -> Plugin | None:
    """Return the plugin of the engines that the job starts; None if they need none."""
    return None if job.spec.uses_pool else engine_of(job.spec).launch.plugin(job.spec)


def openenv(job: RLJob, gang: Gang, index: int) -> list[Container]:
    """Return the user's OpenEnv server, on the first pod of an engine if the job has one.

    It runs the command of its image and gets no variables, volumes or tokens of the job.
    """
    environment = job.spec.rollout.environment
    openenv = environment.openenv if environment else None
    if openenv is None or openenv.image is None or (gang.role, index) != ("rollout", 0):
        return []
    return [
        {
            "name": "openenv",
            "image": openenv.image,
            "ports": [{"name": "openenv", "containerPort": openenv.port}],
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": security(job, "openenv"),
        }
    ]


def _place(job: RLJob, gang: Gang, attempt: int) -> ServerPlacement:
    head = f"{names.pod_name(job, 'rollout', gang.replica, attempt, 0)}.{names.engines_name(job)}"
    return ServerPlacement(
        model=model_path(job),
        draft=draft_path(job),
        bind="$(SLUICE_BIND)",
        port="$(SLUICE_PORT_HTTP)",
        index="$(SLUICE_INDEX)",
        head=f"{head}:{names.PORTS['master']}" if gang.size > 1 else None,
    )


def plugin_container(job: RLJob, plugin: Plugin, images: Images) -> Container:
    """Return the init container that brings sluice's plugin to the engine.

    It copies the plugin from the worker's image into a volume that the engine mounts.
    """
    return container(
        job, "plugin", images.rollout, list(plugin.command), [], {}, [volumes.plugin_mount(plugin)]
    )
