"""Translates verl's groups algorithm, critic and distillation, and the policy's loss."""

from __future__ import annotations

from typing import Any, get_args

from sluice.api.groups.losses import PolicyLossName
from sluice_migrate.draft import Draft
from sluice_migrate.translation import (
    Setting,
    Settings,
    as_integer,
    as_number,
    as_path,
    as_text,
    set_field,
)
from sluice_migrate.verl.table import kl_type

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "grpo_passk",
    "optimal_token_baseline": "optimal_token_baseline",
    "gdpo": "gdpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
_LOSSES = {
    "gspo": "gspo",
    "cispo": "cispo",
    "gpg": "reinforce",
    "geo_mean": "geo_mean",
    "sapo": "sapo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "clip-cov": "clip_cov",
    "kl-cov": "kl_cov",
}
# Keys that only one loss reads, and their fields.
_LOSS_KEYS = {
    "sapo": {"tau_pos": "loss.gate.positive", "tau_neg": "loss.gate.negative"},
    "clip_cov": {
        "policy_loss.clip_cov_ratio": "loss.covariance.ratio",
        "policy_loss.clip_cov_lb": "loss.covariance.lower",
        "policy_loss.clip_cov_ub": "loss.covariance.upper",
    },
    "kl_cov": {"policy_loss.kl_cov_ratio": "loss.covariance.ratio"},
}
_SCOPES = {
    "token": "token",
    "seq_sum": "sequence_sum",
    "seq_mean": "sequence_mean",
    "seq_max": "sequence_max",
}
# Older names of `rollout_rs`.
_OLDER_SCOPES = {"token": "token", "sequence": "sequence_sum", "geometric": "sequence_mean"}

_DISTILLATION_LOSS = "distillation.distillation_loss"
_TEACHERS = "distillation.teacher_models."
_SEVERAL = (
    "start each of several teachers as an SGLang server: distillation.teacher.url, or "
    "distillation.teachers[] by data source"
)
_DIVERGENCES = {"forward_kl_topk": "forward_kl", "reverse_kl_topk": "reverse_kl", "jsd_topk": "jsd"}


def policy(draft: Draft, settings: Settings) -> None:
    """Translate estimator, loss, clipping and what else belongs to the policy."""
    adv_estimator = settings.take("algorithm.adv_estimator")
    if adv_estimator is None:
        draft.note(
            "other default", "algorithm.estimator", "ppo (verl: gae, algorithm.adv_estimator)"
        )
    estimator = _ESTIMATORS.get(str(adv_estimator.value) if adv_estimator else "gae")
    mode = settings.take(f"{_ACTOR}.policy_loss.loss_mode")
    loss = str(mode.value) if mode else "vanilla"
    if adv_estimator and estimator is None:
        why = (
            f"algorithm.estimator is one of {', '.join(sorted(set(_ESTIMATORS.values())))}; write "
            "another one as a function"
        )
        draft.note("not translated", adv_estimator.shown, why, adv_estimator.line)
    # gspo and cispo are losses in verl, and estimators in sluice.
    elif loss in ("gspo", "cispo") and estimator == "grpo":
        draft.set("algorithm.estimator", loss, f"{_ACTOR}.policy_loss.loss_mode")
    else:
        draft.set(
            "algorithm.estimator",
            estimator,
            adv_estimator.name if adv_estimator else "default of algorithm.adv_estimator",
        )
        _loss(draft, mode, loss)
    if estimator == "gdpo":
        _parts(draft, settings)
    for key, field in _LOSS_KEYS.get(draft.get("algorithm.loss.type"), {}).items():
        setting = settings.take(f"{_ACTOR}.{key}")
        set_field(
            draft,
            f"algorithm.{field}",
            None if setting is None or setting.value is None else setting,
            as_number,
        )
    coef = settings.get(f"{_ACTOR}.policy_loss.ppo_kl_coef")
    if coef and draft.get("algorithm.loss.type") == "kl_cov" and coef.value not in (1, "1", "1.0"):
        draft.note("not translated", coef.shown, "kl_cov's penalty has the weight 1", coef.line)
    settings.used |= {
        name for name in settings if name.startswith((f"{_ACTOR}.policy_loss.", f"{_ACTOR}.tau_"))
    }
    _clip(draft, settings, bounded=loss in ("vanilla", "dppo_tv", "dppo_kl"))
    betas = settings.take(f"{_ACTOR}.optim.betas")
    set_field(draft, "trainer.optimizer.beta1", betas, lambda value: _pair(value)[0])
    set_field(draft, "trainer.optimizer.beta2", betas, lambda value: _pair(value)[1])
    if settings.on("algorithm.filter_groups.enable"):
        draft.set("rollout.dynamicFilter", "nonzero_std", "algorithm.filter_groups.enable")
    checkpointing = settings.take("actor_rollout_ref.model.enable_gradient_checkpointing")
    if checkpointing and checkpointing.value is True:
        draft.set("trainer.recompute", "full", checkpointing.name)


def _parts(draft: Draft, settings: Settings) -> None:
    keys = settings.take("algorithm.gdpo_reward_keys")
    weights = settings.take("algorithm.gdpo_reward_weights")
    if keys is None or not isinstance(keys.value, list):
        return
    # verl weighs all parts by 1 if there are no weights.
    numbers = weights.value if weights and isinstance(weights.value, list) else [1.0] * 16
    parts = [
        {"name": str(name), "weight": as_number(weight)}
        for name, weight in zip(keys.value, numbers, strict=False)
    ]
    draft.set("algorithm.rewardParts", parts, keys.name)


def _loss(draft: Draft, mode: Setting | None, loss: str) -> None:
    if mode is None or loss == "vanilla":
        return
    if loss in _LOSSES:
        draft.set("algorithm.loss.type", _LOSSES[loss], f"{_ACTOR}.policy_loss.loss_mode")
    else:
        losses = ", ".join(get_args(PolicyLossName))
        why = f"algorithm.loss.type is one of {losses}; write another one as loss.function"
        draft.note("not translated", mode.shown, why, mode.line)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"expected two numbers, found {value!r}")
    return as_number(value[0]), as_number(value[1])


def _clip(draft: Draft, settings: Settings, *, bounded: bool) -> None:
    set_field(draft, "algorithm.loss.clip.low", settings.take(f"{_ACTOR}.clip_ratio"), as_number)
    dual = settings.take(f"{_ACTOR}.clip_ratio_c")
    if bounded and not set_field(draft, "algorithm.loss.clip.dual", dual, as_number):
        draft.set("algorithm.loss.clip.dual", 3.0, "default of actor.clip_ratio_c")
        draft.note(
            "other default",
            "algorithm.loss.clip.dual",
            "3.0 (verl, actor.clip_ratio_c); sluice has none",
        )


def kl(draft: Draft, settings: Settings) -> None:
    """Translate the KL of the loss and of the reward."""
    # Both coefficients have this default in verl.
    default = Setting("default of kl_loss_coef and kl_ctrl.kl_coef", (0.001,))
    coef, kind = settings.take(f"{_ACTOR}.kl_loss_coef"), settings.take(f"{_ACTOR}.kl_loss_type")
    if settings.on(f"{_ACTOR}.use_kl_loss"):
        set_field(draft, "algorithm.kl.lossCoef", coef or default, as_number)
        set_field(
            draft,
            "algorithm.kl.type",
            kind or Setting("default of kl_loss_type", ("low_var_kl",)),
            kl_type,
        )
    coef, kind = settings.take("algorithm.kl_ctrl.kl_coef"), settings.take("algorithm.kl_penalty")
    if settings.on("algorithm.use_kl_in_reward"):
        set_field(draft, "algorithm.kl.coef", coef or default, as_number)
        _adaptive(draft, settings)
        if draft.get("algorithm.kl.type") is None:
            set_field(
                draft,
                "algorithm.kl.type",
                kind or Setting("default of kl_penalty", ("kl",)),
                kl_type,
            )


def _adaptive(draft: Draft, settings: Settings) -> None:
    kind = settings.take("algorithm.kl_ctrl.type")
    if kind is None or kind.value != "adaptive":
        return
    draft.set("algorithm.kl.adaptive", {}, kind.name)
    for key, field, convert in (
        ("target_kl", "target", as_number),
        ("horizon", "horizon", as_integer),
    ):
        setting = settings.get(f"algorithm.kl_ctrl.{key}")
        set_field(draft, f"algorithm.kl.adaptive.{field}", setting, convert)


def corrections(draft: Draft, settings: Settings) -> None:
    """Translate algorithm.rollout_correction: importance sampling, rejection, veto."""
    weights, most = (
        settings.take(f"{_CORRECTION}.rollout_is"),
        settings.take(f"{_CORRECTION}.rollout_is_threshold"),
    )
    if weights and weights.value not in (None, False):
        low, high = _bounds(most.value) if most else (None, None)
        draft.set("algorithm.offPolicy.method", "tis" if low is None else "icepop", weights.name)
        set_field(draft, "algorithm.offPolicy.level", weights, as_text)
        for field, value in (("low", low), ("high", high)):
            if most and value is not None:
                draft.set(f"algorithm.offPolicy.{field}", value, most.name)
    kind = settings.take(f"{_CORRECTION}.loss_type")
    for name in (f"{_CORRECTION}.bypass_mode", f"{_ACTOR}.use_rollout_log_probs"):
        if not settings.on(name):
            continue
        if (
            kind and kind.value == "reinforce"
        ):  # without a ratio to the engine's policy; the weights above correct it
            draft.set("algorithm.loss.type", "reinforce", kind.name)
        else:
            draft.set("algorithm.offPolicy.oldLogProbs", "rollout", name)
    _rejection(draft, settings)
    set_field(
        draft,
        "algorithm.offPolicy.veto",
        settings.take(f"{_CORRECTION}.rollout_token_veto_threshold"),
        as_number,
    )
    normal = f"{_CORRECTION}.rollout_is_batch_normalize"
    if settings.on(normal) and draft.get("algorithm.offPolicy.method"):
        draft.set("algorithm.offPolicy.normalize", True, normal)


def _rejection(draft: Draft, settings: Settings) -> None:
    """Translate `rollout_rs`: names separated by commas, or one of the older names."""
    rollout_rs = settings.take(f"{_CORRECTION}.rollout_rs")
    most, least = (
        settings.take(f"{_CORRECTION}.rollout_rs_threshold{end}") for end in ("", "_lower")
    )
    if rollout_rs is None or rollout_rs.value is None:
        return
    names = [name.strip() for name in as_text(rollout_rs.value).split(",")]
    shared = settings.get(f"{_CORRECTION}.rollout_is_threshold")
    thresholds = [setting.value for setting in (most, shared) if setting]
    threshold = next((value for value in thresholds if value is not None), 2.0)
    limits = [part.strip() for part in str(threshold).split(",")]
    try:
        rules = [
            _rule(name, limit) for name, limit in zip(names, limits * len(names), strict=False)
        ]
    except ValueError as error:
        draft.note("not translated", rollout_rs.shown, str(error), rollout_rs.line)
        return
    if least and least.value is not None:
        rules[0]["low"] = as_number(least.value)
    draft.set("algorithm.offPolicy.reject", rules, rollout_rs.name)


def _rule(name: str, limit: str) -> dict[str, Any]:
    """Translate one name of `rollout_rs`.

    The k1 measures of verl bound pi_rollout / pi_train, the inverse of sluice's ratio, so lower and
    upper bound are exchanged.
    """
    if name in _OLDER_SCOPES:
        return {"over": _OLDER_SCOPES[name], "high": as_number(limit)}
    if name == "binary_kl":
        return {"measure": name, "high": as_number(limit)}
    scope, _, measure = name.rpartition("_")
    if scope not in _SCOPES or measure not in ("k1", "k2", "k3"):
        raise ValueError(f"algorithm.offPolicy.reject has no counterpart of {name!r}")
    if measure != "k1":
        return {"measure": measure, "over": _SCOPES[scope], "high": as_number(limit)}
    low, high = _bounds(limit)
    return {
        "over": _SCOPES[scope],
        **({"high": high} if low is None else {"low": 1 / high, "high": 1 / low}),
    }


def _bounds(value: Any) -> tuple[float | None, float]:
    """Parse bounds: `2.0` is (None, 2.0), `0.5_2.0` is (0.5, 2.0)."""
    low, separator, high = str(value).partition("_")
    return (as_number(low), as_number(high)) if separator else (None, as_number(low))


def critic(draft: Draft, settings: Settings) -> None:
    """Translate the critic, if the estimator has one."""
    if draft.get("algorithm.estimator") != "ppo":
        return
    set_field(draft, "algorithm.critic.modelPath", settings.get("critic.model.path"), as_path)
    set_field(draft, "algorithm.critic.lr", settings.get("critic.optim.lr"), as_number)
    # verl counts steps from 1, and trains the policy from step `critic_warmup` on.
    set_field(
        draft,
        "algorithm.critic.warmupSteps",
        settings.get("trainer.critic_warmup"),
        lambda n: max(0, as_integer(n) - 1),
    )
    if not set_field(
        draft, "algorithm.critic.clip", settings.get("critic.cliprange_value"), as_number
    ):
        draft.set("algorithm.critic.clip", 0.5, "default of critic.cliprange_value")
        draft.note("other default", "algorithm.critic.clip", "0.5 (verl, critic.cliprange_value)")


def distillation(draft: Draft, settings: Settings) -> None:
    """Translate a teacher to an advantage of sampled tokens, or a divergence over all tokens."""
    settings.used |= {name for name in settings if name.startswith("distillation.")}
    if not settings.on("distillation.enabled"):
        return
    mode = settings.get(f"{_DISTILLATION_LOSS}.loss_mode")
    by_sample, name = (
        settings.on(f"{_DISTILLATION_LOSS}.use_policy_gradient"),
        str(mode.value) if mode else "",
    )
    if name not in (("kl", "k1") if by_sample else _DIVERGENCES):
        why = (
            "sluice has the policy gradient of k1 at sampled tokens (use_policy_gradient with "
            "loss_mode k1), and divergences over the vocabulary (forward_kl_topk without "
            "use_policy_gradient)"
        )
        draft.note("not translated", "distillation.enabled", why)
        return
    paths = [
        settings[name]
        for name in settings
        if name.startswith(_TEACHERS) and name.endswith(".model_path")
    ]
    if len(paths) != 1:
        draft.note("not translated", "distillation.teacher_models", _SEVERAL)
        return
    set_field(
        draft,
        "algorithm.distillation.teacher.path",
        paths[0],
        as_path,
        "the trainer computes it; or start a server and set teacher.url",
    )
    if mode and not by_sample:
        note = "sluice computes it over the whole vocabulary, not over the teacher's top k"
        set_field(
            draft,
            "algorithm.distillation.divergence",
            mode,
            lambda value: _DIVERGENCES[str(value)],
            note,
        )
        if name == "jsd_topk":
            set_field(
                draft,
                "algorithm.distillation.beta",
                settings.get(f"{_DISTILLATION_LOSS}.jsd_beta"),
                as_number,
            )
    set_field(
        draft,
        "algorithm.distillation.coef",
        settings.get(f"{_DISTILLATION_LOSS}.distillation_loss_coef"),
        as_number,
    )
    rewards = settings.get(f"{_DISTILLATION_LOSS}.use_task_rewards")
    if rewards and rewards.value is False:
        _without_reward(draft)


def _without_reward(draft: Draft) -> None:
    """Remove the job's reward, and keep it for evaluations."""
    reward = draft.spec.pop("reward", None)
    for dataset in draft.get("evaluation.datasets") or []:
        dataset["reward"] = reward
