"""The translation of each of slime's arguments. Names and defaults of slime 0.3 and Megatron-LM."""

from __future__ import annotations

from typing import Any

from sluice_migrate.draft import (
    Lost,
    Same,
    To,
    Translation,
    flag,
    integer,
    location,
    real,
    text,
)
from sluice_migrate.host_optimizer import OTHERS
from sluice_migrate.recompute import recompute, recompute_modules
from sluice_migrate.slime.unsupported_keys import REST


def _engine_value(value: Any) -> Any:
    for convert in (integer, real):
        try:
            return convert(value)
        except ValueError:
            continue
    return value


def _pg_loss(value: Any) -> str:
    if value != "reinforce":
        raise ValueError("algorithm.loss follows the estimator, as slime's ppo does")
    return "reinforce"


_ALWAYS = Same("sluice does it always")
_SHAPE = Same("the model's shape is read from its config.json")
_VOLUME = Lost(
    "checkpoints go to spec.checkpoint.volume, or the run directory; a job resumes from its own by "
    "itself"
)
_HOOK = Lost("sluice has no hook of this kind")

TABLE: dict[str, Translation] = REST | {
    # model and checkpoints
    "--hf-checkpoint": To("model.path", location),
    "--load": _VOLUME,
    "--save": _VOLUME,
    "--ref-load": Lost(
        "the reference is the model as it is at step 0; model.referencePath names another HF "
        "directory"
    ),
    "--save-interval": To("checkpoint.everySteps", integer),
    "--async-save": To("checkpoint.async", flag),
    "--save-hf": Lost(
        "the final model is exported always (checkpoint.exportHF), to the checkpoint volume"
    ),
    # cluster
    "--actor-num-nodes": To("trainer.nodes", integer),
    "--actor-num-gpus-per-node": To("trainer.gpusPerNode", integer),
    # prompts
    "--rollout-shuffle": To("data.shuffle", flag),
    "--rollout-seed": To("data.seed", integer),
    "--rollout-max-prompt-len": To("data.maxPromptTokens", integer),
    "--multimodal-keys": Lost("sluice trains on text alone"),
    "--data-source-path": Lost(
        "data.prompts[].source takes a function that yields rows, not a DataSource"
    ),
    # rollout
    "--rollout-batch-size": To("rollout.batchSize", integer),
    "--n-samples-per-prompt": To("rollout.samplesPerPrompt", integer),
    "--rollout-temperature": To("rollout.sampling.temperature", real),
    "--rollout-top-p": To("rollout.sampling.topP", real),
    "--rollout-top-k": To("rollout.sampling.topK", integer),
    "--rollout-max-response-len": To("rollout.sampling.maxResponseTokens", integer),
    "--deterministic-mode": To("trainer.deterministic", flag, "the engine's kernels too"),
    "--sglang-enable-fp32-lm-head": To("model.fp32LmHead", flag, "the trainer's head too"),
    "--rollout-max-context-len": To("rollout.engineArgs.context-length", integer),
    "--rollout-stop-token-ids": Lost(
        "SGLang takes them from the model's generation_config.json: eos_token_id"
    ),
    "--rollout-skip-special-tokens": Same("responses are decoded without special tokens"),
    "--sglang-server-concurrency": To("rollout.concurrency", integer),
    "--partial-rollout": To("rollout.partial.enabled", flag),
    "--mask-offpolicy-in-partial-rollout": To("rollout.partial.maskOffPolicy", flag),
    "--custom-generate-function-path": To(
        "rollout.function",
        text,
        "it runs as it is; what it may import of slime: docs/agents.md",
    ),
    "--rollout-sample-hook-path": To(
        "rollout.hooks.beforeReward",
        text,
        "its parameters differ: (prompt, sample) in place of (args, sample)",
    ),
    "--rollout-sample-filter-path": To(
        "rollout.hooks.afterReward",
        text,
        "its parameters differ: (prompt, sample), a mask of zeros for remove_sample",
    ),
    "--rollout-function-path": Lost(
        "the buffer decides what is generated; rollout.function may fill a prompt's whole group "
        "(whole_group)"
    ),
    "--eval-function-path": Lost("evaluation.datasets[].function is for one prompt"),
    # algorithm
    "--advantage-estimator": To("algorithm.estimator", text),
    "--pg-loss-type": To("algorithm.loss", _pg_loss),
    "--normalize-advantages": To("algorithm.normalizeAdvantages", flag),
    "--gamma": To("algorithm.gamma", real),
    "--lambd": To("algorithm.lambda", real),
    "--eps-clip": To("algorithm.clip.low", real),
    "--eps-clip-high": To("algorithm.clip.high", real),
    "--eps-clip-c": To("algorithm.clip.dual", real),
    "--kl-coef": To("algorithm.kl.coef", real),
    "--kl-loss-type": To("algorithm.kl.type", text),
    "--entropy-coef": To("algorithm.entropyCoef", real),
    "--tis-clip": To("algorithm.offPolicy.high", real),
    "--tis-clip-low": To("algorithm.offPolicy.low", real),
    "--custom-loss-function-path": To(
        "algorithm.lossFunction", text, "its parameters differ: docs/algorithms.md"
    ),
    "--disable-rewards-normalization": Lost(
        "a group's mean is part of grpo; reinforce_plus_plus has no baseline"
    ),
    "--opd-teacher-ckpt-step": Lost("algorithm.distillation.teacher.path names one checkpoint"),
    "--custom-advantage-function-path": Lost(
        "algorithm.estimator: custom takes a function of other parameters"
    ),
    "--custom-tis-function-path": Lost(
        "algorithm.offPolicy has tis, icepop, reject (MIS) and veto; other corrections are a "
        "lossFunction"
    ),
    "--get-mismatch-metrics": _ALWAYS,
    "--ref-update-interval": Lost("the reference stays as it is"),
    # critic
    "--num-critic-only-steps": To("algorithm.critic.warmupSteps", integer),
    "--value-clip": To("algorithm.critic.clip", real),
    "--critic-lr": To("algorithm.critic.lr", real),
    "--critic-load": Lost("algorithm.critic.modelPath wants a Hugging Face directory"),
    # trainer
    "--lr": To("trainer.optimizer.lr", real),
    "--min-lr": To("trainer.optimizer.minLr", real),
    "--lr-decay-style": To("trainer.optimizer.schedule", text),
    "--lr-warmup-iters": To("trainer.optimizer.warmupSteps", integer),
    "--lr-warmup-fraction": Lost(
        "set trainer.optimizer.warmupSteps to a number of steps", unless=("0", "0.0")
    ),
    "--lr-decay-iters": To("trainer.optimizer.decaySteps", integer),
    "--weight-decay": To("trainer.optimizer.weightDecay", real),
    "--adam-beta1": To("trainer.optimizer.beta1", real),
    "--adam-beta2": To("trainer.optimizer.beta2", real),
    "--adam-eps": To("trainer.optimizer.eps", real),
    "--clip-grad": To("trainer.optimizer.clipGrad", real),
    "--optimizer": Lost("sluice has AdamW", unless=("adam",)),
    "--tensor-model-parallel-size": To("trainer.parallelism.tensor", integer),
    "--pipeline-model-parallel-size": To("trainer.parallelism.pipeline", integer),
    "--context-parallel-size": To("trainer.parallelism.context", integer),
    "--expert-model-parallel-size": To("trainer.parallelism.expert", integer),
    "--num-virtual-stages-per-pipeline-rank": To("trainer.parallelism.virtualPipeline", integer),
    "--num-layers-per-virtual-pipeline-stage": Lost(
        "trainer.parallelism.virtualPipeline counts a rank's runs"
    ),
    "--expert-tensor-parallel-size": Lost(
        "experts are not split by tensor parallelism", unless=("1",)
    ),
    "--decoder-first-pipeline-num-layers": To("trainer.parallelism.firstStageLayers", integer),
    "--decoder-last-pipeline-num-layers": To("trainer.parallelism.lastStageLayers", integer),
    "--sequence-parallel": _ALWAYS,
    "--recompute-granularity": To("trainer.recompute", recompute),
    "--recompute-modules": To(
        "trainer.recomputeModules", recompute_modules, many=recompute_modules
    ),
    "--recompute-method": Same("part of recompute"),
    "--recompute-num-layers": Same("part of recompute"),
    "--max-tokens-per-gpu": To("trainer.maxTokensPerGpu", integer),
    "--use-dynamic-batch-size": _ALWAYS,
    "--micro-batch-size": Same("micro-batches are packed by tokens"),
    "--log-probs-max-tokens-per-gpu": Same("as trainer.maxTokensPerGpu"),
    "--balance-data": _ALWAYS,
    **{f"--{name.replace('_', '-')}": entry for name, entry in OTHERS.items()},
    **dict.fromkeys(("--no-pin-cpu-grads", "--no-pin-cpu-params"), OTHERS["pin_cpu_grads"]),
    "--fp16": Lost("trainer.precision is bf16 or fp32"),
    "--bf16": _ALWAYS,
    "--seed": Lost("one seed for all, data.seed", unless=("42",)),
    # weights
    "--update-weight-buffer-size": To(
        "weightSync.bucketMiB", lambda value: max(1, integer(value) >> 20)
    ),
    "--update-weight-transport": To("weightSync.transport", text),
    "--update-weights-interval": Lost("weights go out after every step", unless=("1",)),
    "--update-weight-mode": Lost("weights are sent whole", unless=("full",)),
    "--use-fault-tolerance": _ALWAYS,
    # evaluation
    "--eval-top-p": To("evaluation.sampling.topP", real),
    "--eval-top-k": To("evaluation.sampling.topK", integer),
    "--eval-temperature": To("evaluation.sampling.temperature", real),
    "--eval-max-response-len": To("evaluation.sampling.maxResponseTokens", integer),
    "--n-samples-per-eval-prompt": To("evaluation.samplesPerPrompt", integer),
    "--eval-config": Lost(
        "the file is not read; its datasets belong into evaluation.datasets, with their rewards "
        "and functions"
    ),
    "--log-passrate": Lost("evaluation.passAtK: [1, 2, 4, ...] gives pass@k of evaluations"),
    # reward
    "--reward-key": To("reward.key", text),
    "--group-rm": To("reward.group", flag),
    "--eval-reward-key": Lost("one reward.key for training and evaluation"),
    # debugging
    "--debug-rollout-only": To("debug.rolloutOnly", flag),
    "--save-debug-rollout-data": Lost(
        "debug.dumpRollouts: true keeps all samples, in the run directory"
    ),
    "--debug-train-only": Lost("debug.replay trains on the rollouts of an earlier run"),
    "--use-tensorboard": _ALWAYS,
    **dict.fromkeys(
        (
            "--attention-dropout",
            "--hidden-dropout",
            "--accumulate-allreduce-grads-in-fp32",
            "--no-gradient-accumulation-fusion",
            "--attention-softmax-in-fp32",
            "--attention-backend",
            "--train-backend",
            "--use-flash-attn",
            "--use-distributed-optimizer",
            "--distributed-backend",
            "--no-check-for-nan-in-loss-and-grad",
        ),
        _ALWAYS,
    ),
    **dict.fromkeys(
        (
            "--swiglu",
            "--num-layers",
            "--hidden-size",
            "--ffn-hidden-size",
            "--num-attention-heads",
            "--group-query-attention",
            "--num-query-groups",
            "--use-rotary-position-embeddings",
            "--disable-bias-linear",
            "--add-qkv-bias",
            "--normalization",
            "--norm-epsilon",
            "--rotary-base",
            "--rotary-percent",
            "--vocab-size",
            "--kv-channels",
            "--qk-layernorm",
            "--untie-embeddings-and-output-weights",
            "--num-experts",
            "--moe-ffn-hidden-size",
            "--moe-router-topk",
            "--moe-layer-freq",
            "--moe-shared-expert-intermediate-size",
            "--make-vocab-size-divisible-by",
        ),
        _SHAPE,
    ),
}

DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    ("trainer.gpusPerNode", 8, "--actor-num-gpus-per-node"),
    ("data.shuffle", False, "--rollout-shuffle"),
    ("rollout.samplesPerPrompt", 1, "--n-samples-per-prompt"),
    ("rollout.concurrency", 512, "--sglang-server-concurrency"),
    ("trainer.optimizer.schedule", "linear", "--lr-decay-style"),
    ("trainer.optimizer.weightDecay", 0.01, "--weight-decay"),
    ("trainer.optimizer.beta2", 0.999, "--adam-beta2"),
)
"""(field, slime's default, its flag) where sluice's default is another."""


def fallback(name: str) -> Translation:
    """The entry of an argument that is not in the table."""
    if name.startswith("--sglang-"):
        return To(f"rollout.engineArgs.{name.removeprefix('--sglang-')}", _engine_value, many=list)
    if name.startswith(("--router-", "--use-slime-router", "--slime-router")):
        return Same("workers pull their prompts: there is no router")
    if name.startswith(("--custom-", "--buffer-filter", "--rollout-")) and name.endswith("-path"):
        return _HOOK
    return Lost("sluice knows no such argument")
