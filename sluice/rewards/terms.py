"""Terms that are added to the reward of training samples (`reward.terms`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sluice.api.groups.reward_terms import RewardTerm
from sluice.rewards.types import DEFAULT_KEY, Judgement, RewardInput

_TAGS = ("think",)
_NGRAM = 3


def with_terms(
    judgement: Judgement, sample: RewardInput, terms: Sequence[RewardTerm], key: str | None = None
) -> Judgement:
    """Add the terms to the reward, and each unweighted term to the parts.

    The original reward stays a part, under `reward.key` (default: score).
    """
    reward, parts = judgement
    values: dict[str, float] = {t.type: value_of(t, sample, reward) for t in terms}
    total = reward + sum(term.weight * values[term.type] for term in terms)
    return total, {(key or DEFAULT_KEY): reward, **parts, **values}


def value_of(term: RewardTerm, sample: RewardInput, reward: float) -> float:
    """Return a term before its weight. `reward` is the sample's reward without any term."""
    match term.type:
        case "format":
            tags = term.tags or _TAGS
            return float(has_format(sample.response, tags, opened=term.opened))
        case "repetition":
            tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
            return -repeated(tokens, term.ngram or _NGRAM)
        case "length":
            assert term.longest is not None
            return by_length(sample.response_length, term.longest, right=reward >= 1)


def has_format(response: str, tags: Sequence[str], *, opened: bool = False) -> bool:
    """Return whether the response starts with the tags, each opened and closed once, in order.

    Only white space may separate the tags; anything may follow the last. For one tag this equals
    TRL's `think_format_reward`. Open-R1's `format_reward` expects `think` and `answer` and no text
    after them.

    Parameters
    ----------
    response
        Text of the response.
    tags
        Names of the tags.
    opened
        True if the prompt already contains the first opening tag.

    """
    text = f"<{tags[0]}>{response}" if opened else response
    at = 0
    for tag in tags:
        begin, end = f"<{tag}>", f"</{tag}>"
        if text.count(begin) != 1 or text.count(end) != 1:
            return False
        start, stop = text.index(begin), text.index(end)
        if text[at:start].strip() or stop < start:
            return False
        at = stop + len(end)
    return True


def repeated(tokens: Sequence[int], ngram: int) -> float:
    """Return 1 - distinct / all n-grams of the tokens; 0 for fewer tokens than `ngram`.

    Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning", appendix C.2. TRL's
    `get_repetition_penalty_reward` does the same; Open-R1's uses words.
    """
    count = len(tokens) - ngram + 1
    if count <= 0:
        return 0.0
    return 1 - len({tuple(tokens[i : i + ngram]) for i in range(count)}) / count


def by_length(length: int, longest: int, *, right: bool) -> float:
    """Return the cosine reward for length, in [-1, 0].

    Yeo et al. 2025, equation 1; Open-R1's `get_cosine_scaled_reward`. A right response loses more
    the longer it is. A wrong one loses more the shorter it is, since the model may have thought too
    little.
    """
    progress = min(length / longest, 1.0)
    closeness = (1 + math.cos(math.pi * progress)) / 2
    return closeness - 1 if right else -closeness
