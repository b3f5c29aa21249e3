"""The quickstart under one estimator after another: what is set beside its manifest."""

from __future__ import annotations

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "ppo": (
        "algorithm.estimator=ppo",
        "algorithm.lambda=0.95",
        "algorithm.normalizeAdvantages=true",
        "algorithm.critic={lr: 1.5e-3}",
    ),
    "reinforce_plus_plus": ("algorithm.estimator=reinforce_plus_plus",),
    "gspo": ("algorithm.estimator=gspo", "algorithm.clip={low: 0.03, high: 0.04}", "trainer.stepsPerBatch=2"),
    "cispo": ("algorithm.estimator=cispo", "algorithm.clip={low: 1.0, high: 0.28}", "trainer.stepsPerBatch=2"),
}
"""Name -> overrides. gspo and cispo take two optimizer steps a batch: with one, every ratio is 1."""
