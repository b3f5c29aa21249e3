"""Translates slime's supervised fine-tuning: `--loss-type sft_loss` with its rollout function."""

from __future__ import annotations

from sluice_migrate.draft import Draft
from sluice_migrate.translation import Settings

# Arguments that have no effect without generated samples.
_SAMPLING = (
    "--rm-type",
    "--rm-url",
    "--custom-rm-path",
    "--reward-key",
    "--group-rm",
    "--n-samples-per-prompt",
    "--advantage-estimator",
    "--normalize-advantages",
    "--gamma",
    "--lambd",
    "--disable-grpo-std-normalization",
    "--eps-clip",
    "--eps-clip-high",
    "--eps-clip-c",
    "--kl-coef",
    "--use-opd",
    "--opd-type",
    "--opd-kl-coef",
    "--use-tis",
    "--tis-clip",
    "--tis-clip-low",
    "--use-opsm",
    "--opsm-delta",
    "--use-rollout-logprobs",
    "--use-routing-replay",
    "--use-rollout-routing-replay",
    "--num-critic-only-steps",
    "--value-clip",
    "--critic-lr",
    "--partial-rollout",
    "--mask-offpolicy-in-partial-rollout",
    "--dynamic-sampling-filter-path",
    "--over-sampling-batch-size",
    "--rollout-temperature",
    "--rollout-top-p",
    "--rollout-top-k",
    "--rollout-max-response-len",
    "--rollout-stop",
    "--disable-compute-advantages-and-returns",
    "--debug-train-only",
    "--colocate",
    "--rollout-num-gpus",
    "--rollout-num-gpus-per-engine",
    "--eval-interval",
    "--eval-prompt-data",
)
_ENGINE_FIELDS = (
    "rollout.samplesPerPrompt",
    "rollout.concurrency",
    "rollout.replicas",
    "rollout.gpusPerReplica",
    "rollout.nodesPerReplica",
    "rollout.sampling.maxResponseTokens",
)


def supervised(draft: Draft, settings: Settings) -> bool:
    """Translate the loss of supervised fine-tuning; returns False for any other script."""
    loss = settings.take("--loss-type")
    if loss is None or loss.value != "sft_loss":
        if loss and loss.value not in ("policy_loss", "custom_loss"):
            why = "sluice has policy_loss, custom_loss and sft_loss"
            draft.note("not translated", loss.shown, why, loss.line)
        return False
    draft.set("algorithm.loss.type", "sft", loss.name)
    # Without engines there is no asynchronous rollout.
    draft.drop("rollout.mode")
    draft.drop("rollout.maxStaleness")
    function, kind = (
        settings.pop("--rollout-function-path", None),
        settings.pop("--loss-mask-type", None),
    )
    if function and "sft_rollout" not in str(function.value):
        why = (
            "sluice reads conversations, prompts with answers, or token ids with masks; see "
            "docs/data.md"
        )
        draft.note("not translated", function.shown, why, function.line)
    if kind and kind.value != "qwen":
        why = (
            "slime renders each message on its own; sluice renders the conversation with the chat "
            "template, and skips rows if the template drops a part of an answer"
        )
        draft.note("check", kind.shown, why, kind.line)
    for name in _SAMPLING:
        settings.pop(name, None)
    if "--calculate-per-token-loss" not in settings:
        draft.set("algorithm.aggregation", "sequence_mean", "default of --calculate-per-token-loss")
        draft.note(
            "other default",
            "algorithm.aggregation",
            "sequence_mean (slime, without --calculate-per-token-loss)",
        )
    return True


def without_engines(draft: Draft) -> None:
    """Remove fields of engines, which supervised fine-tuning does not need."""
    for path in _ENGINE_FIELDS:
        draft.drop(path)
    draft.notes = [note for note in draft.notes if note.subject not in _ENGINE_FIELDS]
