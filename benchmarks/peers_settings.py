"""TRL's settings for a job: each from the job's spec, so that the two cannot drift apart.

What TRL cannot be told, or would do differently, is refused by the name of its field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sluice.api import RLJobSpec
from sluice.api.groups.off_policy import OffPolicy

# algorithm.aggregation -> GRPOConfig.loss_type.
LOSS_TYPES = {"sequence_mean": "grpo", "token_mean": "dapo", "token_sum_norm": "dr_grpo"}
OWN = "the peer's alone"


class NoEqualSettingError(ValueError):
    """A job that a peer cannot be made to train in the same way. The text names the field."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a peer, and the field of the spec that it is from."""

    name: str
    value: Any
    field: str = OWN


def trl_settings(spec: RLJobSpec, *, micro_batches: int = 1) -> list[Setting]:
    """Arguments of TRL's GRPOConfig for the policy step of this job.

    micro_batches: parts that TRL computes a step's samples in, one after another. The learning rate
    of each step is given by itself: TRL has no schedule that ends at `minLr`. Raises
    NoEqualSettingError.
    """
    check(spec)
    return [*_batches(spec, micro_batches), *_loss(spec), *_optimizer(spec), *_machine(spec)]


def check(spec: RLJobSpec) -> None:
    """Raise NoEqualSettingError where TRL has no equal."""
    algorithm, rollout = spec.algorithm, spec.rollout
    refused = {
        "algorithm.estimator": (algorithm.estimator != "grpo", "expected grpo"),
        "algorithm.loss.type": (algorithm.policy_loss != "ppo", "expected ppo"),
        "algorithm.loss.function": (algorithm.loss.function is not None, "expected none"),
        "algorithm.aggregation": (
            algorithm.loss_aggregation not in LOSS_TYPES,
            f"expected one of {', '.join(LOSS_TYPES)}",
        ),
        "algorithm.entropyCoef": (
            algorithm.entropy_coef != 0 and algorithm.loss_aggregation != "token_mean",
            "TRL's bonus is a mean over tokens: set algorithm.aggregation to token_mean",
        ),
        "algorithm.kl.coef": (algorithm.kl.coef != 0, "TRL has no KL in the reward"),
        "algorithm.kl.type": (
            algorithm.kl.loss_coef != 0 and algorithm.kl.type != "k3",
            "TRL's KL is k3",
        ),
        "algorithm.loss.clip.dual": (algorithm.loss.clip.dual is not None, "expected none"),
        "algorithm.normalizeAdvantages": (algorithm.whitens, "TRL does not whiten"),
        "algorithm.offPolicy": (algorithm.off_policy != OffPolicy(), "expected the defaults"),
        "algorithm.overlong": (algorithm.overlong is not None, "expected none"),
        "rollout.mode": (rollout.mode != "sync", "TRL generates and trains in turns"),
        "rollout.dynamicFilter": (rollout.dynamic_filter is not None, "expected none"),
        "rollout.sampling.stop": (bool(rollout.sampling.stop), "expected none"),
        "trainer.stepsPerBatch": (spec.trainer.steps_per_batch != 1, "expected 1"),
        "reward.function": (
            spec.reward is None or spec.reward.function is None,
            "expected a function: both systems call it",
        ),
    }
    for field, (differs, expected) in refused.items():
        if differs:
            raise NoEqualSettingError(f"spec.{field}: no equal setting in TRL; {expected}")


def _batches(spec: RLJobSpec, micro_batches: int) -> list[Setting]:
    rollout, sampling = spec.rollout, spec.rollout.sampling
    samples = rollout.batch_size * rollout.samples_per_prompt
    if samples % micro_batches:
        raise NoEqualSettingError(
            f"spec.rollout.batchSize x samplesPerPrompt = {samples} cannot be split into "
            f"{micro_batches} equal parts"
        )
    return [
        Setting("max_steps", spec.trainer.steps, "trainer.steps"),
        Setting(
            "per_device_train_batch_size",
            samples // micro_batches,
            "rollout.batchSize x samplesPerPrompt / parts",
        ),
        Setting("gradient_accumulation_steps", micro_batches, "parts"),
        Setting("steps_per_generation", micro_batches, "trainer.stepsPerBatch x parts"),
        Setting("num_generations", rollout.samples_per_prompt, "rollout.samplesPerPrompt"),
        Setting("num_iterations", 1),
        Setting("shuffle_dataset", False),
        Setting(
            "max_completion_length",
            sampling.max_response_tokens,
            "rollout.sampling.maxResponseTokens",
        ),
        Setting("temperature", sampling.temperature, "rollout.sampling.temperature"),
        Setting("top_p", sampling.top_p, "rollout.sampling.topP"),
        Setting("top_k", max(sampling.top_k, 0), "rollout.sampling.topK"),
        Setting("min_p", None),
        Setting("repetition_penalty", 1.0),
    ]


def _loss(spec: RLJobSpec) -> list[Setting]:
    algorithm = spec.algorithm
    return [
        Setting("loss_type", LOSS_TYPES[algorithm.loss_aggregation], "algorithm.aggregation"),
        Setting(
            "scale_rewards",
            "group" if algorithm.normalize_std else "none",
            "algorithm.normalizeStd",
        ),
        Setting("importance_sampling_level", "token", "algorithm.loss.type"),
        Setting("epsilon", algorithm.loss.clip.low, "algorithm.loss.clip.low"),
        Setting("epsilon_high", algorithm.loss.clip.highest, "algorithm.loss.clip.high"),
        Setting("delta", None, "algorithm.loss.clip.dual"),
        Setting("beta", algorithm.kl.loss_coef, "algorithm.kl.lossCoef"),
        Setting("use_bias_correction_kl", algorithm.kl.unbiased, "algorithm.kl.unbiased"),
        Setting("entropy_coef", algorithm.entropy_coef, "algorithm.entropyCoef"),
        Setting("top_entropy_quantile", 1.0),
        Setting("mask_truncated_completions", False),
        Setting("disable_dropout", True),
    ]


def _optimizer(spec: RLJobSpec) -> list[Setting]:
    optimizer = spec.trainer.optimizer
    return [
        Setting("optim", "adamw_torch"),
        Setting("learning_rate", optimizer.lr, "trainer.optimizer.lr"),
        Setting("adam_beta1", optimizer.beta1, "trainer.optimizer.beta1"),
        Setting("adam_beta2", optimizer.beta2, "trainer.optimizer.beta2"),
        Setting("adam_epsilon", optimizer.eps, "trainer.optimizer.eps"),
        Setting("weight_decay", optimizer.weight_decay, "trainer.optimizer.weightDecay"),
        Setting("max_grad_norm", optimizer.clip_grad, "trainer.optimizer.clipGrad"),
    ]


def _machine(spec: RLJobSpec) -> list[Setting]:
    on_gpu = spec.trainer.gpus_per_node > 0
    precision = spec.trainer.precision or ("bf16" if on_gpu else "fp32")
    return [
        Setting("use_cpu", not on_gpu, "trainer.gpusPerNode"),
        Setting("bf16", precision == "bf16", "trainer.precision"),
        Setting("gradient_checkpointing", spec.trainer.recompute != "none", "trainer.recompute"),
        Setting("use_vllm", False),
        Setting("seed", spec.data.seed, "data.seed"),
    ]
