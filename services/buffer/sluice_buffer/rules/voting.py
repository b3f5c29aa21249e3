"""Majority voting among the answers to a prompt (self-consistency: Wang et al. 2022). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from sluice_buffer.group import SampleFacts

_SILENT = "-"


def votes(answers: Sequence[float | None]) -> str:
    """Return the answers of a group, numbered in the order of their first use: `0 1 0 -`.

    `answers` has a number for each sample, equal for equal answers, or None. The result is empty if
    no sample has an answer.
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
    """Return `maj@k` for each k above 1: how often the majority of k samples is right.

    A right answer has reward 1. A group of n samples counts with the mean over its n // k blocks of
    k samples, each of which votes once; among equally frequent answers the first counts (verl).

    Parameters
    ----------
    groups
        Facts and `votes` of each group. Groups without votes are left out.
    ks
        Numbers of samples that vote.

    """
    ballots = [(facts, text.split(" ")) for facts, text in groups if text]
    ballots = [(facts, answers) for facts, answers in ballots if len(facts) == len(answers)]
    rates = {}
    for k in ks:
        scores = [
            _mean_of_blocks(facts, answers, k) for facts, answers in ballots if len(facts) >= k > 1
        ]
        if scores:
            rates[f"maj@{k}"] = fmean(scores)
    return rates


def _mean_of_blocks(facts: Sequence[SampleFacts], answers: Sequence[str], k: int) -> float:
    starts = range(0, len(facts) - k + 1, k)
    return fmean(_is_right(facts[i : i + k], answers[i : i + k]) for i in starts)


def _is_right(facts: Sequence[SampleFacts], answers: Sequence[str]) -> bool:
    counts = Counter(answer for answer in answers if answer != _SILENT)
    if not counts:
        return False
    winner = counts.most_common(1)[0][0]
    return facts[answers.index(winner)].reward == 1
