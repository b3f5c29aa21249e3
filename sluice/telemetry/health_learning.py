"""Health rules about learning: rewards, entropy, KL, log-probs, truncation, gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from sluice.telemetry.health_records import Record, Rule, shown, values

FLAT_STEPS = 10
_ENTROPY_SHARE, _ENTROPY_LEAST = 0.05, 1e-3
_KL_LIMIT, _PPO_KL_LIMIT = 1.0, 0.1
_LOGPROB_LIMIT, _AGE_LIMIT = 0.1, 0.05
_TRUNCATED_SHARE, _TRUNCATED_STEPS = 0.5, 3
_SPIKE, _SPIKE_LEAST = 10.0, 1.0
_FAILED_SHARE = 0.2
_TEACHER_FACTOR, _TEACHER_LEAST = 2.0, 0.5


def _not_finite(history: Sequence[Record]) -> str | None:
    """Warn about NaN and infinity, which Python writes into JSON and reads back."""
    bad = [n for n, v in history[-1].items() if isinstance(v, float) and not math.isfinite(v)]
    if not bad:
        return None
    return (
        f"{', '.join(sorted(bad)[:3])} is not a finite number: lower trainer.optimizer.lr, or "
        "inspect the samples"
    )


def _equal_rewards(history: Sequence[Record]) -> str | None:
    ratios = values(history, "rollout/zero_std/ratio")[-FLAT_STEPS:]
    if len(ratios) < FLAT_STEPS or min(ratios) < 1.0:
        return None
    reward = values(history, "rollout/raw_reward")[-1:]
    return (
        f"all rewards of each prompt were equal for {FLAT_STEPS} "
        f"steps{shown(' (reward {:.3g})', reward)}: nothing can be learned from them. Try a "
        "reward with finer grades, easier or harder prompts, more samplesPerPrompt, or a higher "
        "temperature; check the rewards in samples/"
    )


def _entropy_collapse(history: Sequence[Record]) -> str | None:
    entropies = values(history, "train/entropy_loss")
    if len(entropies) < FLAT_STEPS or not values(history, "rollout/raw_reward"):
        return None  # supervised fine-tuning: the answers are given, and low entropy is the aim
    if values(history, "train/opd_reverse_kl"):
        return None  # a confident teacher makes its student confident
    start, now = max(entropies[: len(entropies) // 2]), median(entropies[-3:])
    if now > _ENTROPY_LEAST and now > _ENTROPY_SHARE * start:
        return None
    solved = values(history, "rollout/raw_reward")[-3:]
    if solved and median(solved) >= 0.95:
        return None  # a solved task: low entropy is expected
    return (
        f"entropy has collapsed to {now:.2g}: the policy hardly explores any more. Try "
        "algorithm.entropyCoef, a higher clip.high (0.28), a lower learning rate, or an earlier "
        "checkpoint"
    )


def _kl_explosion(history: Sequence[Record]) -> str | None:
    last = history[-1]
    ppo, reference = abs(last.get("train/ppo_kl", 0.0)), last.get("train/kl_loss", 0.0)
    if ppo > _PPO_KL_LIMIT:
        return (
            f"ppo_kl is {ppo:.2g}: within one batch the policy moves far from the one that "
            "generated it. Try a lower learning rate, fewer trainer.stepsPerBatch, or a smaller "
            "rollout.maxStaleness"
        )
    if reference > _KL_LIMIT:
        return (
            f"the KL to the reference is {reference:.2g}: the policy has moved far from it. Try a "
            "higher algorithm.kl coefficient or a lower learning rate, and look in samples/ for "
            "answers that exploit the reward"
        )
    return None


def _mismatch(history: Sequence[Record]) -> str | None:
    apart, same_weights = _differences(history)
    if apart < _LOGPROB_LIMIT or (same_weights is not None and same_weights < apart / 2):
        return None
    text = f"log-probs of trainer and engine differ by {apart:.2g} on average"
    old_cache = history[-1].get("rollout/old_cache_ratio", 0.0)
    if same_weights is not None and old_cache > 0:
        if "train/tis" in history[-1]:
            return None  # importance sampling in the loss corrects for it
        return (
            f"{text}, also with the same weights, and {old_cache:.0%} of the samples continued "
            "with a cache that older weights had computed (weightSync.pauseMode: in_place), which "
            "can explain it. Try pauseMode: retract, or algorithm.offPolicy.method: tis. If they "
            "differ as much with retract, they compute the model differently: check "
            "rollout.precision, dtype and engineArgs"
        )
    if same_weights is not None:
        return (
            f"{text}, also with the same weights: they compute the model differently. Check "
            "rollout.precision, dtype and engineArgs"
        )
    return (
        f"{text}, and no token was sampled with the weights that are trained. Either the samples "
        "are old: set algorithm.offPolicy.method: tis. Or they compute the model differently: "
        "check dtype and engineArgs"
    )


def _inexact(history: Sequence[Record]) -> str | None:
    """Warn if `trainer.deterministic` is set and the log-probs of trainer and engine differ.

    Later optimizer steps of a batch have other weights than the engine had, so they are skipped.
    """
    apart = history[-1].get("train/train_rollout_logprob_abs_diff_on_policy") or 0.0
    moved = history[-1].get("train/ppo_kl", 0.0) != 0.0
    if not history[-1].get("train/deterministic") or moved or apart == 0.0:
        return None
    return (
        f"log-probs of trainer and engine differ by {apart:.2g} although trainer.deterministic "
        "is set: their images need the same torch and Triton, their GPUs must be of one kind, and "
        "responses that continue with an old cache (pauseMode: in_place) cannot match"
    )


def _old_samples(history: Sequence[Record]) -> str | None:
    """Warn about samples so old that the loss should correct for it.

    A ratio other than 1, or an importance weight, shows that it does.
    """
    apart, same_weights = _differences(history)
    corrected = "train/tis" in history[-1] or abs(history[-1].get("train/ppo_kl", 0.0)) > 0
    if corrected or same_weights is None or apart < _AGE_LIMIT or same_weights >= apart / 2:
        return None
    return (
        f"the policy has moved by {apart:.2g} a token since its samples were made "
        f"({same_weights:.2g} with the same weights), and the loss does not correct for that. Set "
        "algorithm.offPolicy.method: tis, or lower rollout.maxStaleness or the learning rate"
    )


def _differences(history: Sequence[Record]) -> tuple[float, float | None]:
    """Return the log-prob difference of trainer and engine, for all tokens and for on-policy ones.

    Both are medians over the last three steps. The second is None if no token was sampled by these
    weights.
    """
    means = values(history, "train/train_rollout_logprob_abs_diff")[-3:]
    same_weights = values(history, "train/train_rollout_logprob_abs_diff_on_policy")[-3:]
    return median(means) if len(means) == 3 else 0.0, median(same_weights) if same_weights else None


def _truncation(history: Sequence[Record]) -> str | None:
    ratios = values(history, "rollout/truncated_ratio")[-_TRUNCATED_STEPS:]
    if len(ratios) < _TRUNCATED_STEPS or min(ratios) <= _TRUNCATED_SHARE:
        return None
    if history[-1].get("rollout/response_len/max") == 1:
        return None  # answers of one token, such as a letter: the limit is meant
    never_ends = "if the model never ends a turn, check its chat template and end token"
    if values([history[-1]], "multi_turn/turns/mean"):
        return (
            f"{ratios[-1]:.0%} of the episodes end with a turn that was cut off. If the limit is "
            "not intended, try a higher sampling.maxResponseTokens (of all turns together), "
            "rollout.limits.turnTokens, or the max_tokens that your program requests; "
            f"{never_ends}"
        )
    return (
        f"{ratios[-1]:.0%} of the responses are cut off at their token limit. Try a higher "
        f"sampling.maxResponseTokens; {never_ends}"
    )


def _failures(history: Sequence[Record]) -> str | None:
    ratios = values(history, "rollout/failed_ratio")[-_TRUNCATED_STEPS:]
    if len(ratios) < _TRUNCATED_STEPS or min(ratios) <= _FAILED_SHARE:
        return None
    return (
        f"{ratios[-1]:.0%} of the samples fail (reward, teacher or generate function): the rollout "
        "log shows the errors"
    )


def _leaves_teacher(history: Sequence[Record]) -> str | None:
    gaps = values(history, "train/opd_reverse_kl")
    if len(gaps) < FLAT_STEPS:
        return None
    before, now = median(gaps[:3]), median(gaps[-3:])
    if now < _TEACHER_LEAST or now < _TEACHER_FACTOR * before:
        return None
    return (
        f"the reverse KL to the teacher has grown from {before:.2g} to {now:.2g}: the student "
        "moves away from it. Try a lower learning rate, or a higher algorithm.distillation.coef if "
        "there is a reward too; read samples/"
    )


def _gradient_spike(history: Sequence[Record]) -> str | None:
    norms = values(history, "train/grad_norm")
    if len(norms) < FLAT_STEPS:
        return None
    usual = median(norms[:-1])
    if norms[-1] < _SPIKE_LEAST or norms[-1] < _SPIKE * usual:
        return None
    return (
        f"the gradient norm jumped to {norms[-1]:.3g} from the usual {usual:.2g}. Clipping "
        "(optimizer.clipGrad) limits it; if it happens again, lower the learning rate and read "
        "that step's samples"
    )


RULES: dict[str, Rule] = {
    "not finite": _not_finite,
    "equal rewards": _equal_rewards,
    "entropy collapse": _entropy_collapse,
    "KL explosion": _kl_explosion,
    "log-prob mismatch": _mismatch,
    "not deterministic": _inexact,
    "old samples": _old_samples,
    "truncation": _truncation,
    "failures": _failures,
    "teacher left": _leaves_teacher,
    "gradient spike": _gradient_spike,
}
