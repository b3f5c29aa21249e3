"""Jobs that train adapters, for the tests of both backends."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from sluice_trainer.backend_registry import backend_class
from sluice_trainer.policy.learning_policy import LearningPolicy
from tests.integration.trainer import tiny

STEPS = 5
LORA = {"rank": 4, "alpha": 8}
TRAINER: dict[str, Any] = {
    "stepsPerBatch": 2,
    "maxTokensPerGpu": 256,
    "optimizer": {"lr": 5e-3, "eps": tiny.EPS},
    "lora": LORA,
}
KL = {"kl": {"lossCoef": 0.05, "type": "k3"}}
JOBS: dict[str, dict[str, Any]] = {
    "grpo with a KL loss": {"algorithm": KL},
    "ppo": {"algorithm": {"estimator": "ppo", "critic": {"lr": 5e-3}}},
    "sft": {"algorithm": {"loss": {"type": "sft"}}},
    "attention only, rank-stabilised": {
        "algorithm": {},
        "trainer": {
            **TRAINER,
            "lora": {
                "rank": 3,
                "alpha": 8,
                "targetModules": ["q_proj", "v_proj"],
                "rankStabilized": True,
            },
        },
    },
    "pissa with a KL loss": {
        "algorithm": KL,
        "trainer": {
            **TRAINER,
            # Its first weights are larger, and so are their roundings.
            "optimizer": {"lr": 1e-3, "eps": tiny.EPS},
            "lora": {**LORA, "initialise": "pissa"},
        },
    },
}

# Jobs that `backend: megatron` refuses.
FSDP_JOBS: dict[str, dict[str, Any]] = {
    "nf4 with a KL loss": {
        "algorithm": KL,
        "trainer": {**TRAINER, "lora": {**LORA, "quantizeBase": "nf4"}},
    },
}
# Jobs with experts, for a mixture.
EXPERT_JOBS: dict[str, dict[str, Any]] = {
    "experts and attention": {
        "algorithm": KL,
        "trainer": {
            **TRAINER,
            "lora": {**LORA, "targetModules": ["q_proj", "v_proj", "experts"]},
        },
    },
}


def options(name: str, model: Path, *, backend: str = "fsdp", **changes: Any) -> dict[str, Any]:
    """Return the arguments of `estimate_steps.train` for one of the jobs."""
    job = {**JOBS, **FSDP_JOBS, **EXPERT_JOBS}[name]
    trainer = {**TRAINER, **job.get("trainer", {}), "backend": backend}
    return {
        "model": str(model),
        "steps": STEPS,
        "algorithm": job["algorithm"],
        "trainer": trainer,
        **changes,
    }


def make(model: Path, backend: str, /, **changes: Any) -> LearningPolicy:
    """Return a policy of a backend, on this process."""
    changes["trainer"] = {**changes.get("trainer", {}), "backend": backend}
    spec = tiny.spec(model, **changes)
    timeout = timedelta(seconds=tiny.TIMEOUT)
    policy = backend_class(spec)(spec, model_dir=model, timeout=timeout)
    assert isinstance(policy, LearningPolicy)
    return policy
