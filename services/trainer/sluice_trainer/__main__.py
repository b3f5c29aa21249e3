"""`python -m sluice_trainer`: one rank of the trainer."""

from __future__ import annotations

import json
import os
import signal
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.api import RLJob
from sluice.runtime import pod_env
from sluice.runtime.cpu_threads import threads
from sluice.runtime.pod_env import Environment
from sluice.telemetry import endpoints, logs, run_directory, tracing
from sluice.wire import rpc

# torch and Megatron take seconds to import, so functions import them after the manifest is read.
if TYPE_CHECKING:
    from sluice_trainer.backend import Backend
    from sluice_trainer.loop.clients import Clients

COLLECTIVE_MINUTES = 30


def main() -> int:
    """Run this rank; return the exit code of the process."""
    env = pod_env.read("trainer")
    logs.configure(env.role, name=env.name, attempt=env.attempt)
    tracing.configure(env)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    job = env.job()
    job = job.model_copy(update={"spec": job.spec.with_correction()})
    rank = int(os.environ.get("RANK", 0))
    if job.spec.debug.rollout_only and rank > 0:  # one rank is enough to take batches
        return 0

    from sluice_trainer.clients.background import Stopped
    from sluice_trainer.distributed import rank_failure

    try:
        _run(env, job, stop, rank)
    except Stopped:
        logs.get().info("stopped; the same job goes on from here")
        return 128 + signal.SIGTERM
    except RuntimeError as error:
        if not (message := rank_failure.message(error)):
            raise
        logs.get().exception("another rank is gone", role="trainer")
        rank_failure.end(message)
    return 0


def _run(env: Environment, job: RLJob, stop: threading.Event, rank: int) -> None:
    """Connect to the services and train, or with `debug.rolloutOnly` only take batches."""
    from sluice_trainer.loop import rollout_only
    from sluice_trainer.loop.clients import connect

    with connect(env, job.spec, stop, rank=rank) as clients:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # one server for the whole pod
            endpoints.serve(env, ready=clients.member.unready)
        total_steps = job.spec.trainer.steps or clients.buffer.total_steps()
        if job.spec.debug.rollout_only:
            rollout_only.run(env, job, clients, total_steps, stop)
        else:
            _train(env, job, clients, total_steps, stop, rank)


def _train(
    env: Environment,
    job: RLJob,
    clients: Clients,
    total_steps: int,
    stop: threading.Event,
    rank: int,
) -> None:
    """Build the policy, load its newest checkpoint, and run the training loop."""
    from sluice.images.processor import ImageProcessor
    from sluice_trainer.algorithms import custom
    from sluice_trainer.batch.images import ImageExpansion
    from sluice_trainer.batch.preparation import learn
    from sluice_trainer.loop.held_out import HeldOut
    from sluice_trainer.loop.loop import Learn, Loop
    from sluice_trainer.loop.run_records import RunRecords
    from sluice_trainer.model.flops import model_flops
    from sluice_trainer.telemetry.metrics import ENGINE_PRECISION
    from sluice_trainer.telemetry.profiling import Profiles
    from sluice_trainer.telemetry.recorder import Recorder

    spec = job.spec
    ENGINE_PRECISION.labels(spec.rollout.precision, spec.rollout.kv_cache_dtype).set(1)
    policy = _build_policy(env, job, clients, total_steps, rank)
    policy.load_latest(env.directory("checkpoint_dir"))
    fetch_images = clients.buffer.images if spec.data.images else None
    recorder = Recorder.for_job(env, job, fetch_images) if policy.ranks.rank == 0 else None
    profiles = env.directory("run_dir") / run_directory.PROFILES
    flops = model_flops(_model_config(job))
    learn_batch: Learn = partial(learn, policy, custom.estimator(spec.algorithm))
    image_work = None
    if fetch_images:
        processor = ImageProcessor(
            Path(spec.model.path), trust_remote_code=spec.model.trust_remote_code
        )
        expansion = ImageExpansion(processor, fetch_images)
        learn_batch, image_work = expansion.before(learn_batch), expansion.work
    Loop(
        spec,
        policy,
        learn_batch,
        clients,
        policy.ranks,
        RunRecords(spec, policy.ranks, clients.buffer, recorder, flops, image_work),
        checkpoints=env.directory("checkpoint_dir"),
        total_steps=total_steps,
        stop=stop,
        profiles=Profiles(spec.debug.profile, profiles, policy.ranks.rank),
        held_out=HeldOut.of_job(policy, clients.buffer, recorder),
    ).run()
    if recorder:
        recorder.close()


def _build_policy(
    env: Environment, job: RLJob, clients: Clients, total_steps: int, rank: int
) -> Backend:
    from sluice_trainer.backend_registry import backend_class
    from sluice_trainer.checkpoint.checkpoint_directory import Author
    from sluice_trainer.model.families import check_precision, check_speculative

    spec = job.spec
    check_precision(spec, Path(spec.model.path))
    check_speculative(spec, Path(spec.model.path))
    make_policy = backend_class(spec)  # imports for seconds, while colocated engines start
    if spec.trainer.colocate and rank == 0:
        # The other ranks wait for rank 0 before they touch a GPU.
        clients.engines.await_engines(spec.replicas)
        clients.engines.rest()
    _set_threads(_model_config(job))
    # Attempts are counted within a run, and each run has a token (docs/contracts.md).
    author = Author(env.attempt, rpc.run_name())
    return make_policy(
        spec,
        model_dir=Path(spec.model.path),
        timeout=timedelta(minutes=COLLECTIVE_MINUTES),
        total_steps=total_steps,
        author=author,
    )


def _model_config(job: RLJob) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(job.spec.model.path, "config.json").read_text())
    return config


def _set_threads(config: dict[str, Any]) -> None:
    """On a CPU, compute with as many threads as the model can use; on a GPU one is enough."""
    import torch

    from sluice_trainer.distributed.device import DEVICE

    if DEVICE.type == "cpu":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(threads(config, torch.get_num_threads(), ranks))


if __name__ == "__main__":
    logs.run_blocking("trainer", main)
