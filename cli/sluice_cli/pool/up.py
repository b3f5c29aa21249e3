"""`sluice pool up`: run the engines of a pool on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import typer

from sluice.api import ManifestError, RLEnginePool, load_pool
from sluice.stores.cache import hold
from sluice_cli.exits import Exit
from sluice_cli.models.fetching import local
from sluice_cli.pool.host import EngineGaveUpError, PoolHost
from sluice_cli.validate import footprint
from sluice_cli.validate.missing_files import checkpoint_problems
from sluice_client.resolve import resolve_pool
from sluice_operator.cluster.local import gpus, pools, run_state
from sluice_operator.cluster.local.cluster import LocalCluster
from sluice_operator.reconcile import cancelled_by_signals


def run_pool(path: Path, overrides: list[str]) -> int:
    """Run a pool until the user ends it, and return the exit code.

    Raises ManifestError if the pool cannot run on this machine, or if it runs already.
    """
    loaded = load_pool(path, overrides)
    # A pool of this machine is known by its name alone.
    metadata = loaded.metadata.model_copy(update={"namespace": "default"})
    pool = resolve_pool(loaded.model_copy(update={"metadata": metadata}), path.resolve().parent)
    here = local(pool)
    with hold(*here.fetched.values()):
        return _run_here(here.job)


def _run_here(pool: RLEnginePool) -> int:
    """Run a pool whose model is on this machine; return the exit code."""
    check(pool)
    name, directory = pool.metadata.name, pools.directory(pool.metadata.name)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return asyncio.run(_run(pool, directory))
    except run_state.RunDirectoryError as error:
        raise ManifestError(f"pool {name}: {error}") from error
    except OSError as error:
        raise ManifestError(f"pool {name}: {directory}: {error.strerror or error}") from error


def check(pool: RLEnginePool) -> None:
    """Raise ManifestError if this machine cannot run a resolved pool, or runs it already."""
    spec, name = pool.spec, pool.metadata.name
    if pools.is_running(name):
        raise ManifestError(
            f"pool {name} runs already (sluice pool list); sluice pool down {name} ends it"
        )
    if spec.model.volume is not None:
        raise ManifestError(
            "spec.model.volume: this machine has no volumes of a cluster; leave it out and set "
            "spec.model.path to a directory"
        )
    if problems := checkpoint_problems(Path(spec.model.path), tokenizer=True, cure="add them"):
        raise ManifestError("\n".join(f"spec.model.path: {problem}" for problem in problems))
    if spec.replicas == 0:
        raise ManifestError("spec.replicas: 0 starts no engine; expected at least 1")
    needed, visible = spec.replicas * spec.gpus_per_replica, len(gpus.visible_gpus())
    if needed > visible:
        raise ManifestError(
            f"the engines need {needed} GPU(s), and this machine shows {visible} "
            "(CUDA_VISIBLE_DEVICES); lower spec.replicas, or set spec.gpusPerReplica: 0 to run on "
            "CPUs"
        )
    if problem := footprint.pool_shortage(spec):
        raise ManifestError(problem)


async def _run(pool: RLEnginePool, directory: Path) -> int:
    async with LocalCluster(directory) as cluster:
        host = PoolHost(pool, cluster, typer.echo)
        try:
            with cancelled_by_signals():
                try:
                    await host.run()
                except asyncio.CancelledError:
                    typer.echo(f"pool {pool.metadata.name} ends")
                    # After a second signal the end of this block kills the engines.
                    with contextlib.suppress(asyncio.CancelledError):
                        await host.stop()
                    return Exit.DONE
        except EngineGaveUpError as error:
            typer.echo(f"error: {error}", err=True)
            return Exit.FAILED
        finally:
            pools.remove(pool.metadata.name)
