"""verl's settings for a job: hydra overrides, each from the job's spec.

What verl cannot be told, or would do differently, is refused by the name of its field.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.peers_settings import NoEqualSettingError, Setting
from sluice.api import RLJobSpec
from sluice.api.groups.engine_args import kebab
from sluice.api.groups.off_policy import OffPolicy

# algorithm.aggregation -> actor.loss_agg_mode.
LOSS_AGGREGATIONS = {
    "sequence_mean": "seq-mean-token-mean",
    "token_mean": "token-mean",
    "token_sum": "seq-mean-token-sum",
    "token_sum_norm": "seq-mean-token-sum-norm",
}
NO_DUAL_CLIP = 1e9
# A chat template that leaves a prompt unchanged: verl always applies one.
PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SGLANG = f"+{ROLLOUT}.engine_kwargs.sglang"
CPU_TOKENS = 16384
RATES = f"+{ACTOR}.optim.override_optimizer_config.rates"
PROMPT_TOKENS, TEMPLATE = "data.max_prompt_length", "actor_rollout_ref.model.custom_chat_template"
# Settings that depend on a run's rows.
OF_A_RUN = (PROMPT_TOKENS, RATES, TEMPLATE)


def verl_settings(
    spec: RLJobSpec, *, prompt_tokens: int, rates: list[float], chat: bool
) -> list[Setting]:
    """Overrides of verl's `ppo_trainer` for the policy step of this job. A name with a plus is not
    in verl's own file.

    prompt_tokens: of the longest prompt; rates: the learning rate of each step, because verl has no
    linear schedule; chat: prompts are messages. Raises NoEqualSettingError.
    """
    check(spec)
    return [
        *_batches(spec, prompt_tokens, chat),
        *_loss(spec),
        *_optimizer(spec, rates),
        *_machine(spec),
    ]


def override(setting: Setting) -> str:
    """A setting as an argument of verl's program. JSON's texts, lists and numbers are hydra's."""
    return f"{setting.name}={json.dumps(setting.value)}"


def check(spec: RLJobSpec) -> None:
    """Raise NoEqualSettingError where verl has no equal, or this comparison does not use it."""
    algorithm, rollout, trainer = spec.algorithm, spec.rollout, spec.trainer
    refused = {
        "algorithm.estimator": (algorithm.estimator != "grpo", "expected grpo"),
        "algorithm.loss.type": (algorithm.policy_loss != "ppo", "expected ppo"),
        "algorithm.loss.function": (algorithm.loss.function is not None, "expected none"),
        "algorithm.aggregation": (
            algorithm.loss_aggregation not in LOSS_AGGREGATIONS,
            f"expected one of {', '.join(LOSS_AGGREGATIONS)}",
        ),
        "algorithm.kl.coef": (algorithm.kl.coef != 0, "expected 0"),
        "algorithm.kl.type": (
            algorithm.kl.loss_coef != 0 and (algorithm.kl.type != "k3" or algorithm.kl.unbiased),
            "expected k3, not unbiased",
        ),
        "algorithm.normalizeAdvantages": (algorithm.whitens, "expected no whitening"),
        "algorithm.offPolicy": (algorithm.off_policy != OffPolicy(), "expected the defaults"),
        "algorithm.overlong": (algorithm.overlong is not None, "expected none"),
        "rollout.mode": (rollout.mode != "sync", "expected sync"),
        "rollout.dynamicFilter": (rollout.dynamic_filter is not None, "expected none"),
        "rollout.sampling.stop": (bool(rollout.sampling.stop), "expected none"),
        "trainer.stepsPerBatch": (trainer.steps_per_batch != 1, "expected 1"),
        "trainer.colocate": (
            trainer.gpus_per_node > 0 and not trainer.colocate,
            "verl's sync trainer and its engine share their GPUs: expected true",
        ),
        "reward.function": (
            spec.reward is None or ":" not in (spec.reward.function or ""),
            "expected path/to/file.py:name",
        ),
    }
    for field, (differs, expected) in refused.items():
        if differs:
            raise NoEqualSettingError(f"spec.{field}: no equal setting in verl; {expected}")


def _batches(spec: RLJobSpec, prompt_tokens: int, chat: bool) -> list[Setting]:
    rollout, sampling = spec.rollout, spec.rollout.sampling
    tokens = spec.trainer.max_tokens_per_gpu or CPU_TOKENS
    template = [] if chat else [Setting(TEMPLATE, PLAIN)]
    return [
        Setting("trainer.total_training_steps", spec.trainer.steps, "trainer.steps"),
        Setting("data.train_batch_size", rollout.batch_size, "rollout.batchSize"),
        Setting(f"{ACTOR}.ppo_mini_batch_size", rollout.batch_size, "rollout.batchSize"),
        Setting(f"{ACTOR}.ppo_epochs", 1, "trainer.stepsPerBatch"),
        Setting(f"{ACTOR}.use_dynamic_bsz", True),
        Setting(f"{ACTOR}.ppo_max_token_len_per_gpu", tokens, "trainer.maxTokensPerGpu"),
        Setting(f"{ROLLOUT}.n", rollout.samples_per_prompt, "rollout.samplesPerPrompt"),
        Setting("data.shuffle", False),
        Setting(PROMPT_TOKENS, prompt_tokens),
        Setting(
            "data.max_response_length",
            sampling.max_response_tokens,
            "rollout.sampling.maxResponseTokens",
        ),
        Setting(f"{ROLLOUT}.temperature", sampling.temperature, "rollout.sampling.temperature"),
        Setting(f"{ROLLOUT}.top_p", sampling.top_p, "rollout.sampling.topP"),
        Setting(
            f"{ROLLOUT}.top_k",
            sampling.top_k if sampling.top_k > 0 else -1,
            "rollout.sampling.topK",
        ),
        *template,
    ]


def _loss(spec: RLJobSpec) -> list[Setting]:
    algorithm = spec.algorithm
    clip = algorithm.loss.clip
    aggregation = LOSS_AGGREGATIONS[algorithm.loss_aggregation]
    return [
        Setting("algorithm.adv_estimator", "grpo", "algorithm.estimator"),
        Setting(
            "algorithm.norm_adv_by_std_in_grpo", algorithm.normalize_std, "algorithm.normalizeStd"
        ),
        Setting("algorithm.use_kl_in_reward", False, "algorithm.kl.coef"),
        Setting(f"{ACTOR}.policy_loss.loss_mode", "vanilla", "algorithm.loss.type"),
        Setting(f"{ACTOR}.loss_agg_mode", aggregation, "algorithm.aggregation"),
        Setting(
            f"{ACTOR}.loss_scale_factor",
            spec.rollout.sampling.max_response_tokens if aggregation.endswith("norm") else None,
            "rollout.sampling.maxResponseTokens",
        ),
        Setting(f"{ACTOR}.clip_ratio_low", clip.low, "algorithm.loss.clip.low"),
        Setting(f"{ACTOR}.clip_ratio_high", clip.highest, "algorithm.loss.clip.high"),
        Setting(f"{ACTOR}.clip_ratio_c", clip.dual or NO_DUAL_CLIP, "algorithm.loss.clip.dual"),
        Setting(f"{ACTOR}.use_kl_loss", algorithm.kl.loss_coef != 0, "algorithm.kl.lossCoef"),
        Setting(f"{ACTOR}.kl_loss_coef", algorithm.kl.loss_coef, "algorithm.kl.lossCoef"),
        Setting(f"{ACTOR}.kl_loss_type", "k3", "algorithm.kl.type"),
        Setting(f"{ACTOR}.entropy_coeff", algorithm.entropy_coef, "algorithm.entropyCoef"),
    ]


def _optimizer(spec: RLJobSpec, rates: list[float]) -> list[Setting]:
    optimizer, optim = spec.trainer.optimizer, f"{ACTOR}.optim"
    return [
        # torch's AdamW, with the learning rate of each step and no decay of norms and biases.
        Setting(f"{optim}.optimizer_impl", "benchmarks.peers_verl_optimizer"),
        Setting(f"{optim}.lr", optimizer.lr, "trainer.optimizer.lr"),
        Setting(f"{optim}.betas", [optimizer.beta1, optimizer.beta2], "trainer.optimizer.beta1, 2"),
        Setting(f"+{optim}.override_optimizer_config.eps", optimizer.eps, "trainer.optimizer.eps"),
        Setting(RATES, rates, "trainer.optimizer.schedule"),
        Setting(f"{optim}.weight_decay", optimizer.weight_decay, "trainer.optimizer.weightDecay"),
        Setting(f"{optim}.clip_grad", optimizer.clip_grad, "trainer.optimizer.clipGrad"),
        Setting(f"{ACTOR}.grad_clip", optimizer.clip_grad, "trainer.optimizer.clipGrad"),
    ]


def _machine(spec: RLJobSpec) -> list[Setting]:
    trainer, on_gpu = spec.trainer, spec.trainer.gpus_per_node > 0
    precision = trainer.precision or ("bf16" if on_gpu else "fp32")
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[precision]
    engine: dict[str, Any] = {
        kebab(key).replace("-", "_"): value for key, value in spec.rollout.engine_args.items()
    }
    memory = engine.pop("mem_fraction_static", None)
    if not on_gpu:  # verl asks for FlashInfer and a GPU's memory saver
        engine = {
            "device": "cpu",
            "attention_backend": "torch_native",
            "enable_memory_saver": False,
            "enable_weights_cpu_backup": False,
            "max_total_tokens": CPU_TOKENS,
            **engine,
        }
    return [
        Setting("trainer.n_gpus_per_node", max(trainer.gpus_per_node, 1), "trainer.gpusPerNode"),
        Setting("trainer.nnodes", trainer.nodes, "trainer.nodes"),
        Setting("trainer.device", "cuda" if on_gpu else "cpu", "trainer.gpusPerNode"),
        Setting(f"{ACTOR}.strategy", "fsdp2", "trainer.backend"),
        Setting(f"{ACTOR}.fsdp_config.strategy", "fsdp2", "trainer.backend"),
        Setting(
            f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype", precision, "trainer.precision"
        ),
        Setting(f"{ACTOR}.fsdp_config.dtype", dtype, "trainer.precision"),
        Setting(f"{ACTOR}.fsdp_config.use_torch_compile", on_gpu),
        # FlashAttention 2 is not there; packed rows without it would cost the square of all tokens.
        Setting("+actor_rollout_ref.model.override_config.attn_implementation", "sdpa"),
        Setting("actor_rollout_ref.model.use_remove_padding", False),
        Setting(
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            trainer.recompute != "none",
            "trainer.recompute",
        ),
        Setting(f"{ROLLOUT}.name", "sglang", "rollout.engine"),
        Setting(f"{ROLLOUT}.dtype", dtype, "trainer.precision"),
        Setting(f"{ROLLOUT}.tensor_model_parallel_size", 1),
        Setting(f"{ROLLOUT}.max_num_seqs", spec.rollout.concurrency, "rollout.concurrency"),
        Setting(f"{ROLLOUT}.free_cache_engine", on_gpu),
        *(
            [Setting(f"{ROLLOUT}.gpu_memory_utilization", memory, "engineArgs.memFractionStatic")]
            if memory
            else []
        ),
        *(Setting(f"{SGLANG}.{key}", value, "rollout.engineArgs") for key, value in engine.items()),
    ]
