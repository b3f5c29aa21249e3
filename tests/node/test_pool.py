"""A job on the engine of an RLEnginePool, in real pods: workers find the engine by DNS, and it is
killed once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.node.checks import START_SECONDS
from tests.node.conftest import Prepared
from tests.node.jobs import NAME, Quickstart
from tests.node.node import Node, Object, process_of, until

pytestmark = pytest.mark.timeout(2400)
STEPS = 60
SCHEDULER = "sglang::scheduler"


class Pooled(Quickstart):
    """The quickstart with an adapter of a model that has weights, on the engine of a pool."""

    def __init__(self, node: Node, namespace: str, directory: Path) -> None:
        super().__init__(node, namespace, directory)
        self.pool = "shared"

    def _fill(self) -> None:
        super()._fill()
        model = self.volume / "model"
        torch.manual_seed(0)
        weights = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        weights.save_pretrained(model)

    def job(self) -> Object:
        job = super().job()
        spec = job["spec"]
        spec["model"]["init"] = "pretrained"
        spec["rollout"] |= {"pool": self.pool}
        del spec["rollout"]["gpusPerReplica"]
        spec["trainer"] |= {"backend": "fsdp", "steps": STEPS, "lora": {"rank": 8}}
        spec["weightSync"] = {"lora": "adapter", "pauseMode": "versions"}
        spec["failurePolicy"] = {"rolloutBackoffSeconds": 1}
        del spec["evaluation"]
        return job

    def start_pool(self) -> None:
        claim = {"persistentVolumeClaim": {"claimName": NAME}}
        spec = {
            "model": {"path": "model", "volume": claim},
            "gpusPerReplica": 0,
            "maxAdapters": 4,
            "maxRank": 8,
        }
        body = {
            "apiVersion": "sluice.dev/v1alpha1",
            "kind": "RLEnginePool",
            "metadata": {"name": self.pool},
            "spec": spec,
        }
        self.kubectl("apply", "-f", "-", text=json.dumps(body))

    def pool_status(self) -> Object:
        return self.node.get("-n", self.namespace, "rlenginepool", self.pool).get("status") or {}

    def until_engines(self, engines: str) -> None:
        until(
            lambda: self.pool_status().get("engines") == engines,
            f"{engines} engines",
            START_SECONDS,
        )

    def kill_engine(self) -> None:
        (pod,) = self.node.get("-n", self.namespace, "pods", "-l", "sluice.dev/role=engine")[
            "items"
        ]
        process = until(lambda: process_of(pod, SCHEDULER), "the engine's process", 60)
        assert process is not None
        os.kill(process, signal.SIGKILL)

    def story(self) -> str:
        engine = ("logs", f"{self.pool}-engine-0", "--tail=80")
        pool = self.kubectl("describe", "rlenginepool", check=False)
        return "\n".join([super().story(), pool, self.kubectl(*engine, check=False)])

    def remove(self) -> None:
        self.kubectl("delete", "rlenginepool", "--all", "--timeout=60s", seconds=90)
        super().remove()


def test_a_job_trains_on_the_engine_of_a_pool_that_is_killed_once(prepared: Prepared) -> None:
    run = prepared(Pooled)
    run.start()
    run.until(
        lambda: "there is no RLEnginePool shared" in run.condition("Running").get("message", ""),
        "a job that waits for its pool",
        START_SECONDS,
    )
    run.start_pool()
    run.until_engines("1/1")
    run.until_step(3, START_SECONDS)
    assert run.pool_status()["jobs"] == 1
    run.kill_engine()
    reached = run.step()
    run.until_step(reached + 3, START_SECONDS)
    run.until_engines("1/1")
    until(lambda: run.pool_status().get("tokensPerSecond"), "tokens of two looks", 60)
    run.until_state("Succeeded", 2 * START_SECONDS)
    until(lambda: run.pool_status().get("jobs") == 0, "a pool without jobs", 60)
    records = run.metrics()
    assert sorted({record["step"] for record in records}) == list(range(1, STEPS + 1))
    assert max(record["train/train_rollout_logprob_abs_diff_max"] for record in records) < 0.01
