"""Translates each argument of slime. Names and defaults are those of slime 0.3 and Megatron-LM."""

from __future__ import annotations

from typing import Any

from sluice_migrate.megatron import OPTIMIZER_ENTRIES, recompute, recompute_modules
from sluice_migrate.slime.unsupported_keys import MODEL_SHAPE, NO_ROUTER, UNSUPPORTED
from sluice_migrate.translation import (
    ALWAYS,
    PACKED,
    Covered,
    Field,
    Table,
    Translation,
    Unsupported,
    as_boolean,
    as_integer,
    as_number,
    as_path,
    as_text,
)


def _engine_value(value: Any) -> Any:
    for convert in (as_integer, as_number):
        try:
            return convert(value)
        except ValueError:
            continue
    return value


def _precision(value: Any) -> str:
    """Convert SGLang's name of a quantization to `rollout.precision`. Raises ValueError."""
    names = {"fp8": "fp8", "w8a8_fp8": "fp8", "w8a8_int8": "int8", "unquant": "bf16"}
    if value not in names:
        raise ValueError("rollout.precision is bf16, fp8, fp8_block or int8")
    return names[value]


def _speculative(value: Any) -> str:
    """Convert SGLang's name to `rollout.speculative.algorithm`. Raises ValueError."""
    names = {
        "EAGLE": "mtp",  # without a draft model, as in slime's scripts
        "EAGLE3": "eagle3",
        "NEXTN": "mtp",
        "NGRAM": "ngram",
        "STANDALONE": "draft",
    }
    if str(value).upper() not in names:
        raise ValueError("rollout.speculative.algorithm is ngram, eagle3, mtp or draft")
    return names[str(value).upper()]


def _pg_loss(value: Any) -> str:
    if value != "reinforce":
        raise ValueError("algorithm.loss.type follows algorithm.estimator, as slime's ppo does")
    return "reinforce"


_VOLUME = Unsupported(
    "checkpoints go to checkpoint.volume, or to the run directory; a job resumes from its own "
    "checkpoint"
)
_HOOK = Unsupported("sluice has no hook of this kind")
_TRAINER_HOOK = "change its parameters to (context); docs/algorithms.md says what the context has"

_ENTRIES: dict[str, Translation] = UNSUPPORTED | {
    # model and checkpoints
    "--hf-checkpoint": Field("model.path", as_path),
    "--load": _VOLUME,
    "--save": _VOLUME,
    "--ref-load": Unsupported(
        "the reference is the model at step 0; name another Hugging Face directory in "
        "model.referencePath"
    ),
    "--save-interval": Field("checkpoint.everySteps", as_integer),
    "--async-save": Field("checkpoint.async", as_boolean),
    "--save-hf": Unsupported(
        "the final model is always exported to the checkpoint volume (checkpoint.exportHF)"
    ),
    # cluster
    "--actor-num-nodes": Field("trainer.nodes", as_integer),
    "--actor-num-gpus-per-node": Field("trainer.gpusPerNode", as_integer),
    # adapters, in miles; lora.py translates the rest
    "--lora-type": Covered("queries, keys and values always have separate adapters"),
    "--lora-sync-from-tensor": Covered("set weightSync.lora: adapter to send the adapter alone"),
    "--lora-base-cpu-backup": Unsupported(
        "engines that share the trainer's GPUs get merged weights after each step"
    ),
    "--lora-train-only": Unsupported("engines always generate with the weights that are trained"),
    "--experts-shared-outer-loras": Unsupported("each expert has its own A and B"),
    "--multi-lora-n-adapters": Unsupported("a job trains one adapter"),
    # prompts
    "--rollout-shuffle": Field("data.shuffle", as_boolean),
    "--rollout-seed": Field("data.seed", as_integer),
    "--rollout-max-prompt-len": Field("data.maxPromptTokens", as_integer),
    "--data-source-path": Unsupported(
        "write a function that yields rows in place of a DataSource: data.prompts[].source"
    ),
    # rollout
    "--rollout-batch-size": Field("rollout.batchSize", as_integer),
    "--n-samples-per-prompt": Field("rollout.samplesPerPrompt", as_integer),
    "--rollout-temperature": Field("rollout.sampling.temperature", as_number),
    "--rollout-top-p": Field("rollout.sampling.topP", as_number),
    "--rollout-top-k": Field("rollout.sampling.topK", as_integer),
    "--rollout-max-response-len": Field("rollout.sampling.maxResponseTokens", as_integer),
    "--deterministic-mode": Field(
        "trainer.deterministic", as_boolean, "in sluice it also sets the engine's kernels"
    ),
    "--sglang-enable-fp32-lm-head": Field(
        "model.fp32LmHead", as_boolean, "in sluice it also sets the trainer's head"
    ),
    "--rollout-max-context-len": Field("rollout.engineArgs.context-length", as_integer),
    "--rollout-stop-token-ids": Unsupported(
        "SGLang reads them from eos_token_id in the model's generation_config.json"
    ),
    "--rollout-skip-special-tokens": Covered("responses are decoded without special tokens"),
    "--sglang-server-concurrency": Field("rollout.concurrency", as_integer),
    "--sglang-quantization": Field("rollout.precision", _precision),
    "--sglang-speculative-algorithm": Field("rollout.speculative.algorithm", _speculative),
    "--sglang-speculative-draft-model-path": Field("rollout.speculative.model", as_path),
    "--sglang-speculative-num-steps": Field("rollout.speculative.steps", as_integer),
    "--sglang-speculative-eagle-topk": Field("rollout.speculative.topK", as_integer),
    "--sglang-speculative-num-draft-tokens": Covered("steps x topK proposed tokens are verified"),
    "--sglang-kv-cache-dtype": Field("rollout.kvCacheDtype", as_text),
    "--partial-rollout": Field("rollout.partial.enabled", as_boolean),
    "--mask-offpolicy-in-partial-rollout": Field("rollout.partial.maskOffPolicy", as_boolean),
    "--custom-generate-function-path": Field(
        "rollout.function",
        as_text,
        "it runs unchanged; docs/agents/frameworks.md says what it may import of slime",
    ),
    "--rollout-sample-hook-path": Field(
        "rollout.hooks.beforeReward",
        as_text,
        "change its parameters from (args, sample) to (prompt, sample)",
    ),
    "--rollout-sample-filter-path": Field(
        "rollout.hooks.afterReward",
        as_text,
        "change its parameters to (prompt, sample), and remove_sample to a loss mask of zeros",
    ),
    "--rollout-function-path": Unsupported(
        "the buffer decides what is generated; a rollout.function with whole_group may generate "
        "all samples of a prompt"
    ),
    "--custom-megatron-init-path": Field("trainer.hooks.init", as_text, _TRAINER_HOOK),
    "--custom-megatron-before-log-prob-hook-path": Field(
        "trainer.hooks.beforeLogProbs", as_text, _TRAINER_HOOK
    ),
    "--custom-megatron-before-train-step-hook-path": Field(
        "trainer.hooks.beforeTrainStep", as_text, _TRAINER_HOOK
    ),
    "--eval-function-path": Unsupported(
        "write a function for one prompt: evaluation.datasets[].function"
    ),
    # algorithm
    "--advantage-estimator": Field("algorithm.estimator", as_text),
    "--pg-loss-type": Field("algorithm.loss.type", _pg_loss),
    "--normalize-advantages": Field("algorithm.normalizeAdvantages", as_boolean),
    "--gamma": Field("algorithm.gamma", as_number),
    "--lambd": Field("algorithm.lambda", as_number),
    "--eps-clip": Field("algorithm.loss.clip.low", as_number),
    "--eps-clip-high": Field("algorithm.loss.clip.high", as_number),
    "--eps-clip-c": Field("algorithm.loss.clip.dual", as_number),
    "--kl-coef": Field("algorithm.kl.coef", as_number),
    "--kl-loss-type": Field("algorithm.kl.type", as_text),
    "--entropy-coef": Field("algorithm.entropyCoef", as_number),
    "--tis-clip": Field("algorithm.offPolicy.high", as_number),
    "--tis-clip-low": Field("algorithm.offPolicy.low", as_number),
    "--custom-loss-function-path": Field(
        "algorithm.loss.function", as_text, "its parameters differ; see docs/algorithms.md"
    ),
    "--disable-rewards-normalization": Unsupported(
        "grpo always subtracts the group's mean; reinforce_plus_plus has no baseline"
    ),
    "--opd-teacher-ckpt-step": Unsupported(
        "algorithm.distillation.teacher.path names one checkpoint"
    ),
    "--custom-advantage-function-path": Unsupported(
        "its parameters differ from those of a function of algorithm.estimator: custom"
    ),
    "--custom-tis-function-path": Unsupported(
        "algorithm.offPolicy has tis, icepop, reject (MIS) and veto; write other corrections as "
        "algorithm.loss.function"
    ),
    "--get-mismatch-metrics": ALWAYS,
    "--ref-update-interval": Unsupported("the reference is never updated"),
    # critic
    "--num-critic-only-steps": Field("algorithm.critic.warmupSteps", as_integer),
    "--value-clip": Field("algorithm.critic.clip", as_number),
    "--critic-lr": Field("algorithm.critic.lr", as_number),
    "--critic-load": Unsupported("algorithm.critic.modelPath needs a Hugging Face directory"),
    # trainer
    "--lr": Field("trainer.optimizer.lr", as_number),
    "--min-lr": Field("trainer.optimizer.minLr", as_number),
    "--lr-decay-style": Field("trainer.optimizer.schedule", as_text),
    "--lr-warmup-iters": Field("trainer.optimizer.warmupSteps", as_integer),
    "--lr-warmup-fraction": Unsupported(
        "set a number of steps in trainer.optimizer.warmupSteps", unless=("0", "0.0")
    ),
    "--lr-decay-iters": Field("trainer.optimizer.decaySteps", as_integer),
    "--weight-decay": Field("trainer.optimizer.weightDecay", as_number),
    "--adam-beta1": Field("trainer.optimizer.beta1", as_number),
    "--adam-beta2": Field("trainer.optimizer.beta2", as_number),
    "--adam-eps": Field("trainer.optimizer.eps", as_number),
    "--clip-grad": Field("trainer.optimizer.clipGrad", as_number),
    "--optimizer": Unsupported("sluice trains with AdamW", unless=("adam",)),
    "--tensor-model-parallel-size": Field("trainer.parallelism.tensor", as_integer),
    "--pipeline-model-parallel-size": Field("trainer.parallelism.pipeline", as_integer),
    "--context-parallel-size": Field("trainer.parallelism.context", as_integer),
    "--expert-model-parallel-size": Field("trainer.parallelism.expert", as_integer),
    "--num-virtual-stages-per-pipeline-rank": Field(
        "trainer.parallelism.virtualPipeline", as_integer
    ),
    "--num-layers-per-virtual-pipeline-stage": Unsupported(
        "set the virtual stages of a rank in trainer.parallelism.virtualPipeline"
    ),
    "--expert-tensor-parallel-size": Unsupported(
        "sluice does not split experts by tensor parallelism", unless=("1",)
    ),
    "--decoder-first-pipeline-num-layers": Field(
        "trainer.parallelism.firstStageLayers", as_integer
    ),
    "--decoder-last-pipeline-num-layers": Field("trainer.parallelism.lastStageLayers", as_integer),
    "--sequence-parallel": ALWAYS,
    "--recompute-granularity": Field("trainer.recompute", recompute),
    "--recompute-modules": Field(
        "trainer.recomputeModules", recompute_modules, convert_words=recompute_modules
    ),
    "--recompute-method": Covered("part of trainer.recompute"),
    "--recompute-num-layers": Covered("part of trainer.recompute"),
    "--max-tokens-per-gpu": Field("trainer.maxTokensPerGpu", as_integer),
    "--use-dynamic-batch-size": ALWAYS,
    "--micro-batch-size": PACKED,
    "--log-probs-max-tokens-per-gpu": Covered("the same as trainer.maxTokensPerGpu"),
    "--balance-data": ALWAYS,
    **{f"--{name.replace('_', '-')}": entry for name, entry in OPTIMIZER_ENTRIES.items()},
    **dict.fromkeys(
        ("--no-pin-cpu-grads", "--no-pin-cpu-params"), OPTIMIZER_ENTRIES["pin_cpu_grads"]
    ),
    "--fp16": Unsupported("sluice trains in bf16 or fp32: trainer.precision"),
    "--bf16": ALWAYS,
    "--seed": Unsupported("data.seed is the only seed", unless=("42",)),
    # weights
    "--update-weight-buffer-size": Field(
        "weightSync.bucketMiB", lambda value: max(1, as_integer(value) >> 20)
    ),
    "--update-weight-transport": Field("weightSync.transport", as_text),
    "--update-weights-interval": Unsupported(
        "sluice sends weights after every step", unless=("1",)
    ),
    "--update-weight-mode": Unsupported("expected full or delta", unless=("full",)),
    "--use-fault-tolerance": ALWAYS,
    # evaluation
    "--eval-top-p": Field("evaluation.sampling.topP", as_number),
    "--eval-top-k": Field("evaluation.sampling.topK", as_integer),
    "--eval-temperature": Field("evaluation.sampling.temperature", as_number),
    "--eval-max-response-len": Field("evaluation.sampling.maxResponseTokens", as_integer),
    "--n-samples-per-eval-prompt": Field("evaluation.samplesPerPrompt", as_integer),
    "--eval-config": Unsupported(
        "the file is not read. Put its datasets into evaluation.datasets, with their rewards and "
        "functions"
    ),
    "--log-passrate": Unsupported(
        "evaluations report pass@k with evaluation.passAtK: [1, 2, 4, ...]"
    ),
    # reward
    "--reward-key": Field("reward.key", as_text),
    "--group-rm": Field("reward.group", as_boolean),
    "--eval-reward-key": Unsupported("reward.key is used for training and evaluation"),
    # debugging
    "--debug-rollout-only": Field("debug.rolloutOnly", as_boolean),
    "--save-debug-rollout-data": Unsupported(
        "debug.dumpRollouts: true keeps all samples in the run directory"
    ),
    "--debug-train-only": Unsupported("train on the rollouts of an earlier run with debug.replay"),
    "--use-tensorboard": ALWAYS,
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
        ALWAYS,
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
        MODEL_SHAPE,
    ),
}

# (field, slime's default, its argument) if sluice has another default.
_DEFAULTS = (
    ("trainer.gpusPerNode", 8, "--actor-num-gpus-per-node"),
    ("data.shuffle", False, "--rollout-shuffle"),
    ("rollout.samplesPerPrompt", 1, "--n-samples-per-prompt"),
    ("rollout.concurrency", 512, "--sglang-server-concurrency"),
    ("trainer.optimizer.schedule", "linear", "--lr-decay-style"),
    ("trainer.optimizer.weightDecay", 0.01, "--weight-decay"),
    ("trainer.optimizer.beta2", 0.999, "--adam-beta2"),
)


def _engine_argument(name: str) -> Translation:
    path = f"rollout.engineArgs.{name.removeprefix('--sglang-')}"
    return Field(path, _engine_value, convert_words=list)


def _hook(name: str) -> Translation | None:
    return _HOOK if name.endswith("-path") else None


SLIME = Table(
    "slime",
    _ENTRIES,
    prefixes=(
        ("--sglang-", _engine_argument),
        *((prefix, NO_ROUTER) for prefix in ("--router-", "--use-slime-router", "--slime-router")),
        *((prefix, _hook) for prefix in ("--custom-", "--buffer-filter", "--rollout-")),
    ),
    defaults=_DEFAULTS,
)
