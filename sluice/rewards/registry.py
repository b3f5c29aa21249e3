"""Built-in rewards by the name that `reward.type` and a row's `metadata.rm_type` use.

Rewards in IN_PROCESS are cheap and bounded by the length of the response; they run in the worker.
Rewards in IN_POOL use sympy, try many patterns or run what a model wrote; they run in processes
with limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sluice.rewards.builtin.contains import contains
from sluice.rewards.builtin.dapo import dapo
from sluice.rewards.builtin.exact_match import exact_match
from sluice.rewards.builtin.extraction import answer_box
from sluice.rewards.builtin.f1 import f1
from sluice.rewards.builtin.gsm8k import gsm8k
from sluice.rewards.builtin.multiple_choice import gpqa, multiple_choice
from sluice.rewards.builtin.random import by_chance
from sluice.rewards.types import RewardError, RewardFunction, RewardInput, shown

REMOTE = "remote_rm"
BY_SOURCE = "data_source"
_BOXED = "boxed_"


@dataclass(frozen=True, slots=True)
class Pooled:
    """A reward for a judging process, with modules that are imported before its clock starts."""

    function: str
    imports: tuple[str, ...] = ()


IN_PROCESS: dict[str, RewardFunction] = {
    "contains": contains,
    "dapo": dapo,
    "exact_match": exact_match,
    "f1": f1,
    "gpqa": gpqa,
    "gsm8k": gsm8k,
    "multiple_choice": multiple_choice,
    "random": by_chance,
}
_GRADER = ("pylatexenc.latex2text", "sympy.parsing.sympy_parser")
IN_POOL: dict[str, Pooled] = {
    "code": Pooled("sluice.rewards.builtin.code.code"),
    "deepscaler": Pooled("sluice.rewards.builtin.deepscaler.deepscaler", _GRADER),
    "ifbench": Pooled("sluice.rewards.builtin.ifbench.ifbench"),
    "math": Pooled("sluice.rewards.builtin.math.math", ("math_verify",)),
    "math_prm800k": Pooled("sluice.rewards.builtin.math_prm800k.math_prm800k", _GRADER),
    "swe": Pooled("sluice.rewards.builtin.swe.swe"),
}

# verl's default_compute_score (verl/utils/reward_score), by the row's data_source.
_BY_SOURCE = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "hiyouga/geometry3k": "math",
    "math_dapo": "dapo",
    "math": "dapo",
    "math_dapo_reasoning": "dapo",
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code"),
    **dict.fromkeys(
        (
            "numina_aops_forum",
            "numina_synthetic_math",
            "numina_amc_aime",
            "numina_synthetic_amc",
            "numina_cn_k12",
            "numina_olympiads",
        ),
        "math_prm800k",
    ),
}


def names() -> Iterator[str]:
    yield from sorted([*IN_PROCESS, *IN_POOL])


def choose(sample: RewardInput, default: str | None) -> tuple[str | None, RewardInput]:
    """Return the built-in reward of a row, and the sample as that reward sees it.

    A row's `metadata.rm_type` takes precedence over the job's reward. With the prefix `boxed_`
    (slime's) only the content of the last box is judged.

    Returns
    -------
    The name, or None if the job's own function judges the row; and the sample.

    Raises
    ------
    RewardError
        If the name does not exist.

    """
    name = str(sample.metadata.get("rm_type") or default or "").strip()
    if name == BY_SOURCE:
        name = _from_source(sample)
    if not name or name == REMOTE:
        return name or None, sample
    if name.startswith(_BOXED):
        name, sample = (
            name.removeprefix(_BOXED),
            replace(sample, response=answer_box(sample.response) or ""),
        )
    if name not in IN_PROCESS and name not in IN_POOL:
        raise RewardError(
            f"metadata.rm_type: no reward is called {shown(name)}; there are {', '.join(names())}"
        )
    return name, sample


def _from_source(sample: RewardInput) -> str:
    source = str(sample.metadata.get("data_source", ""))
    if source.startswith("aime"):
        return "dapo"
    if source not in _BY_SOURCE:
        raise RewardError(
            f"data_source: {shown(source)} has no reward; those that have are "
            f"{', '.join(sorted(_BY_SOURCE))}, "
            "aime*. Set the row's metadata.rm_type, or reward.type"
        )
    return _BY_SOURCE[source]
