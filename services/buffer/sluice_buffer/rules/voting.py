"""Majority voting among the answers to a prompt (self-consistency: Wang et al. 2022). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from sluice_buffer.group import SampleFacts

_SILENT = "-"


def votes(answers: Sequence[float | None]) -> str:
    """The answers of a group by number, in the order of their coming: `0 1 0 -`; "" where there is
    none at all. answers: of each sample, a number that is equal for equal ones.
    """
    if all(answer is None for answer in answers):
        return ""
    places: dict[float, int] = {}
    return " ".join(
        _SILENT if answer is None else str(places.setdefault(answer, len(places)))
        for answer in answers
    )


def majority(
    groups: Sequence[tuple[Sequence[SampleFacts], str]], ks: Iterable[int]
) -> dict[str, float]:
    """`maj@k` -> how often the answer that most of k samples give is right (reward 1), k above 1.

    Of a group of n the mean over its n // k blocks of k samples, each of which votes once; of
    equally frequent answers the first counts (verl). groups: the facts and `votes` of each; those
    without votes are left out.
    """
    ballots = [(facts, text.split(" ")) for facts, text in groups if text]
    ballots = [(facts, said) for facts, said in ballots if len(facts) == len(said)]
    rates = {}
    for k in ks:
        scores = [_of_blocks(facts, said, k) for facts, said in ballots if len(facts) >= k > 1]
        if scores:
            rates[f"maj@{k}"] = fmean(scores)
    return rates


def _of_blocks(facts: Sequence[SampleFacts], said: Sequence[str], k: int) -> float:
    starts = range(0, len(facts) - k + 1, k)
    return fmean(_is_right(facts[i : i + k], said[i : i + k]) for i in starts)


def _is_right(facts: Sequence[SampleFacts], said: Sequence[str]) -> bool:
    counts = Counter(answer for answer in said if answer != _SILENT)
    if not counts:
        return False
    winner = counts.most_common(1)[0][0]
    return facts[said.index(winner)].reward == 1
