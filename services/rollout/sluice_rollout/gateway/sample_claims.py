"""Samples that a program assembles itself, checked against the turns that the engine generated.

Functions of slime and verl assemble their samples themselves. They decide which tokens are trained.
The turns tell whether the engine has generated each token at its place, with which log-prob and by
which weights.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sluice.samples.sample import Int32, Sample, WeightSpan
from sluice.samples.turns import ENVIRONMENT, MODEL, TURNS
from sluice_rollout.gateway.conversation import Turn


class ClaimError(ValueError):
    """A claim that the turns do not support. The message names the first such token."""


@dataclass(frozen=True, slots=True)
class SampleClaim:
    """Tokens that a program claims as its sample, and which of them to train."""

    tokens: Sequence[int]  # [prompt + response] ids
    mask: Sequence[int]  # [response] 1 for tokens to train, else 0

    def check(self) -> None:
        """Raise ClaimError if the mask is longer than the tokens, or is not made of 0 and 1."""
        if len(self.mask) > len(self.tokens):
            raise ClaimError(
                f"a loss mask of {len(self.mask)} entries for {len(self.tokens)} tokens of prompt "
                "and response: expected one for each token of the response"
            )
        if not set(self.mask) <= {0, 1}:
            raise ClaimError("a loss mask has entries other than 0 and 1")


@dataclass(frozen=True, slots=True)
class _SampledSpan:
    """Tokens [start, end) of a claim, which are the first tokens of a turn."""

    start: int
    end: int
    turn: Turn


def claimed_sample(claim: SampleClaim, turns: Iterable[Turn], sample: Sample) -> Sample:
    """Fill an empty sample from a claim: tokens, masks, log-probs, versions, turns.

    Parameters
    ----------
    claim
        Tokens and mask.
    turns
        Turns that the engine has generated in this episode.
    sample
        The empty sample.

    Returns
    -------
    The same sample.

    Raises
    ------
    ClaimError
        The mask trains a token that no turn has generated at that place, or a turn has images.

    """
    claim.check()
    tokens = np.asarray(claim.tokens, dtype=np.int32)
    at = len(tokens) - len(claim.mask)
    parts = _sampled_spans(tokens, at, turns)
    if any(part.turn.all_images for part in parts):
        raise ClaimError(
            "a conversation with images cannot be claimed, because tokens do not tell which images "
            "their placeholders stand for: leave the sample to the gateway"
        )
    sample.append_prompt(tokens[:at].tolist())
    records: list[dict[str, object]] = []
    version = _first_version(parts)
    for part in parts:
        _append_context(sample, tokens[at : part.start], version, records)
        version = _append_turn(sample, part, records)
        at = part.end
    _append_context(sample, tokens[at:], version, records)
    _apply_mask(sample, claim)
    if parts and (experts := parts[-1].turn.experts) is not None:
        sample.routed_experts = experts[: parts[-1].end - 1]
    sample.metadata[TURNS] = records
    return sample


def _sampled_spans(tokens: Int32, first: int, turns: Iterable[Turn]) -> list[_SampledSpan]:
    """Find the generated spans of the response, in order and without overlaps."""
    matching = sorted(
        (part for turn in turns if (part := _sampled_span(tokens, turn)) and part.start >= first),
        key=lambda part: (part.start, -part.end),
    )
    parts: list[_SampledSpan] = []
    for part in matching:
        if not parts or part.start >= parts[-1].end:
            parts.append(part)
    return parts


def _sampled_span(tokens: Int32, turn: Turn) -> _SampledSpan | None:
    """Find the span that a turn has generated, if the claim contains the turn's whole context."""
    context = turn.context
    start = len(context)
    n = min(len(turn.tokens), len(tokens) - start)
    if n <= 0 or not np.array_equal(context, tokens[:start]):
        return None
    same = turn.tokens[:n] == tokens[start : start + n]
    length = n if same.all() else int(np.argmin(same))
    return _SampledSpan(start, start + length, turn) if length else None


def _first_version(parts: list[_SampledSpan]) -> int:
    return parts[0].turn.spans[0].version if parts and parts[0].turn.spans else 0


def _append_context(
    sample: Sample, tokens: Int32, version: int, records: list[dict[str, object]]
) -> None:
    n = len(tokens)
    if n:
        sample.append(tokens.tolist(), [], [WeightSpan(version, 0, n)], trainable=False)
        records.append({"by": ENVIRONMENT, "length": n, "finish": "stop"})


def _append_turn(sample: Sample, part: _SampledSpan, records: list[dict[str, object]]) -> int:
    """Append a turn. Returns the weight version of its last token."""
    turn, n = part.turn, part.end - part.start
    spans = [WeightSpan(s.version, s.start, min(s.end, n)) for s in turn.spans if s.start < n]
    sample.append(turn.tokens[:n].tolist(), turn.log_probs[:n].tolist(), spans)
    record = {"by": MODEL, "length": n, "finish": turn.finish if n == len(turn.tokens) else "stop"}
    records.append(record | ({"stop": turn.stop} if turn.stop else {}))
    return spans[-1].version


def _apply_mask(sample: Sample, claim: SampleClaim) -> None:
    """Set the loss mask to the claim's. Raises ClaimError."""
    mask = np.asarray(claim.mask, dtype=np.uint8)
    unsupported = np.flatnonzero(mask > sample.loss_mask)
    if len(unsupported):
        i = int(unsupported[0])
        raise ClaimError(
            f"token {i} of the response (id {int(sample.tokens[sample.prompt_length + i])}) is "
            "to be trained, but the engine has not sampled it there (such tokens: "
            f"{len(unsupported)} in all): expected ids of the engine's answers, each after exactly "
            "the tokens of its prompt; mask tokens that the function has written with 0"
        )
    sample.loss_mask = mask
