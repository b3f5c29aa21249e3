"""verl's distillation group -> algorithm.distillation."""

from __future__ import annotations

from sluice_migrate.draft import Draft, Settings, location, put, real

_LOSS = "distillation.distillation_loss"
_TEACHERS = "distillation.teacher_models."
_SEVERAL = (
    "of several teachers each is an SGLang server of yours: distillation.teacher.url, and "
    "teachers[] for data sources"
)
_TOP_K = {"forward_kl_topk": "forward_kl", "reverse_kl_topk": "reverse_kl", "jsd_topk": "jsd"}


def distillation(draft: Draft, settings: Settings) -> None:
    """One teacher, whose opinion of the sampled token is an advantage, or of all words a loss."""
    settings.seen |= {name for name in settings if name.startswith("distillation.")}
    if not settings.on("distillation.enabled"):
        return
    mode = settings.get(f"{_LOSS}.loss_mode")
    by_sample, name = settings.on(f"{_LOSS}.use_policy_gradient"), str(mode.value) if mode else ""
    if name not in (("kl", "k1") if by_sample else _TOP_K):
        why = (
            "sluice has the policy gradient of the sampled token's k1 (use_policy_gradient with "
            "loss_mode k1), and "
            "divergences over all words (forward_kl_topk without use_policy_gradient)"
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
    put(
        draft,
        "algorithm.distillation.teacher.path",
        paths[0],
        location,
        "scored by the trainer; or teacher.url",
    )
    if mode and not by_sample:
        note = "over all words, not the teacher's top k: nothing of either distribution is cut off"
        put(
            draft, "algorithm.distillation.divergence", mode, lambda value: _TOP_K[str(value)], note
        )
        if name == "jsd_topk":
            put(draft, "algorithm.distillation.beta", settings.get(f"{_LOSS}.jsd_beta"), real)
    put(draft, "algorithm.distillation.coef", settings.get(f"{_LOSS}.distillation_loss_coef"), real)
    rewards = settings.get(f"{_LOSS}.use_task_rewards")
    if rewards and rewards.value is False:
        _without_reward(draft)


def _without_reward(draft: Draft) -> None:
    """Learn from the teacher alone; evaluations are still judged."""
    reward = draft.spec.pop("reward", None)
    for dataset in draft.get("evaluation.datasets") or []:
        dataset["reward"] = reward
