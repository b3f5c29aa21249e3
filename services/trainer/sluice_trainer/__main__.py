"""`python -m sluice_trainer`: one rank of the trainer."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sluice.runtime import pod_env
from sluice.runtime.cpu_threads import threads
from sluice.telemetry import endpoints, logs, run_directory, tracing
from sluice.wire import rpc

COLLECTIVE_MINUTES = 30


def main() -> int:
    env = pod_env.read("trainer")
    logs.configure(env.role, name=env.name, attempt=env.attempt)
    tracing.configure(env)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    job = env.job()
    spec = job.spec
    checkpoints = env.directory("checkpoint_dir")

    # torch and Megatron take seconds to import: read the manifest first
    from sluice_trainer.algorithms import custom
    from sluice_trainer.backend import backend_of
    from sluice_trainer.batch.preparation import learn
    from sluice_trainer.checkpoint.checkpoint_directory import Author
    from sluice_trainer.clients.background import Stopped
    from sluice_trainer.clients.clients import connected
    from sluice_trainer.distributed import rank_failure
    from sluice_trainer.loop import rollout_only
    from sluice_trainer.loop.loop import Loop
    from sluice_trainer.model.flops import model_flops
    from sluice_trainer.telemetry.profiling import Profiles
    from sluice_trainer.telemetry.recorder import Recorder

    rank = int(os.environ.get("RANK", 0))
    if spec.debug.rollout_only and rank > 0:  # nothing to do for more than one
        return 0
    try:
        with connected(env, spec, stop, rank=rank) as peers:
            if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # for the whole pod
                endpoints.serve(env, ready=peers.member.unready)
            total = spec.trainer.steps or peers.buffer.total_steps()
            if spec.debug.rollout_only:
                rollout_only.run(env, job, peers, total, stop)
                return 0
            make_policy = backend_of(spec)  # imports for seconds, while colocated engines start
            if (
                spec.trainer.colocate and rank == 0
            ):  # the others wait for it before they touch a GPU
                peers.engines.await_engines(spec.replicas)
                peers.engines.rest()
            config = json.loads(Path(spec.model.path, "config.json").read_text())
            _have_threads(config)
            timeout = timedelta(minutes=COLLECTIVE_MINUTES)
            # Attempts are counted in a run, and a run has a token of its own (docs/contracts.md).
            author = Author(env.attempt, hashlib.sha256(rpc.job_token().encode()).hexdigest()[:12])
            policy = make_policy(
                spec,
                model_dir=Path(spec.model.path),
                timeout=timeout,
                total_steps=total,
                author=author,
            )
            policy.load_latest(checkpoints)
            recorder = Recorder.of(env, job) if policy.ranks.rank == 0 else None
            profiles = env.directory("run_dir") / run_directory.PROFILES
            learning = partial(learn, policy, custom.estimator(spec.algorithm))
            Loop(
                spec,
                policy,
                learning,
                peers,
                policy.ranks,
                checkpoints,
                total,
                recorder,
                stop,
                flops=model_flops(config),
                profiles=Profiles(spec.debug.profile, profiles, policy.ranks.rank),
            ).run()
            if recorder:
                recorder.close()
    except Stopped:
        logs.get().info("stopped; the same job goes on from here")
        return 128 + signal.SIGTERM
    except RuntimeError as error:
        if not (words := rank_failure.words(error)):
            raise
        logs.get().exception("another rank is gone", role="trainer")
        rank_failure.end(words)
    return 0


def _have_threads(config: dict[str, Any]) -> None:
    """Compute with as many threads as the model gains by. On a GPU one is enough."""
    import torch

    from sluice_trainer.distributed.device import DEVICE

    if DEVICE.type == "cpu":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(threads(config, torch.get_num_threads(), ranks))


if __name__ == "__main__":
    logs.run_blocking("trainer", main)
