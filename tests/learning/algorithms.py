"""Runs of `make test-learning`: examples, and the settings added to their manifests."""

from __future__ import annotations

from typing import NamedTuple

from tests.tools import ROOT, VERIFIERS_PYTHON


class Run(NamedTuple):
    """example: a directory of examples/, whose make_data.py makes what the run needs. overrides:
    `path=value`."""

    example: str
    overrides: tuple[str, ...] = ()


# Name -> run. gspo and cispo take two optimizer steps a batch: with one, every ratio is 1. The
# taskset of verifiers need not be installed here.
RUNS: dict[str, Run] = {
    "grpo": Run("quickstart"),
    "ppo": Run(
        "quickstart",
        (
            "algorithm.estimator=ppo",
            "algorithm.lambda=0.95",
            "algorithm.normalizeAdvantages=true",
            "algorithm.critic={lr: 1.5e-3}",
        ),
    ),
    "reinforce_plus_plus": Run("quickstart", ("algorithm.estimator=reinforce_plus_plus",)),
    "gspo": Run(
        "quickstart",
        (
            "algorithm.estimator=gspo",
            "algorithm.loss.clip={low: 0.03, high: 0.04}",
            "trainer.stepsPerBatch=2",
        ),
    ),
    "cispo": Run(
        "quickstart",
        (
            "algorithm.estimator=cispo",
            "algorithm.loss.clip={low: 1.0, high: 0.28}",
            "trainer.stepsPerBatch=2",
        ),
    ),
    "asynchronous": Run(
        "quickstart",
        (
            "rollout.mode=async",
            "rollout.maxStaleness=1",
            "weightSync.pauseMode=in_place",
            "algorithm.offPolicy.method=tis",
        ),
    ),
    "tools": Run("tools"),
    "agent": Run("agents/openai"),
    "code": Run("agents/code"),
    "search": Run("agents/search"),
    "verifiers": Run(
        "agents/verifiers",
        (
            f"rollout.environment.verifiers.python={VERIFIERS_PYTHON}",
            f"rollout.environment.env={{PYTHONPATH: {ROOT}/examples/agents/verifiers}}",
        ),
    ),
    "gym": Run("agents/gym"),
    "sft": Run("sft"),
    "distillation": Run("distillation"),
    "vision": Run("vision"),
    "maze": Run("vision/maze"),
}
