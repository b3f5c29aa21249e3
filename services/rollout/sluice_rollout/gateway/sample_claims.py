"""The sample that a program says it has played, checked against the turns that the engine sampled.

Functions of slime and verl put their sample together themselves. Which tokens are trained is theirs
to say; that each of them was sampled, where it stands, with which log-prob and by which weights, is
known from the turns.

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
    """A sample that was not sampled so. The message names the first token."""


@dataclass(frozen=True, slots=True)
class SampleClaim:
    """tokens: [prompt + response] ids. mask: [response] 1 for what is to be trained."""

    tokens: Sequence[int]
    mask: Sequence[int]

    def check(self) -> None:
        """Raise ClaimError where the mask has no room in the tokens, or holds anything else."""
        if len(self.mask) > len(self.tokens):
            raise ClaimError(
                f"a loss mask of {len(self.mask)} entries for {len(self.tokens)} tokens of prompt "
                "and response: expected one for each token of the response"
            )
        if not set(self.mask) <= {0, 1}:
            raise ClaimError("a loss mask has entries other than 0 and 1")


@dataclass(frozen=True, slots=True)
class _SampledSpan:
    """Tokens [start, end) of the claim, which are the first of a turn's."""

    start: int
    end: int
    turn: Turn


def claimed_sample(claim: SampleClaim, turns: Iterable[Turn], sample: Sample) -> Sample:
    """The claim in an empty sample: tokens, masks, log-probs, versions, turns.

    Raises ClaimError where a token is to be trained that no turn has sampled there.
    """
    claim.check()
    tokens = np.asarray(claim.tokens, dtype=np.int32)
    at = len(tokens) - len(claim.mask)
    parts = _sampled_spans(tokens, at, turns)
    sample.append_prompt(tokens[:at].tolist())
    records: list[dict[str, object]] = []
    version = _first_version(parts)
    for part in parts:
        _observe(sample, tokens[at : part.start], version, records)
        version = _speak(sample, part, records)
        at = part.end
    _observe(sample, tokens[at:], version, records)
    _mask(sample, claim)
    if parts and (experts := parts[-1].turn.experts) is not None:
        sample.routed_experts = experts[: parts[-1].end - 1]
    sample.metadata[TURNS] = records
    return sample


def _sampled_spans(tokens: Int32, first: int, turns: Iterable[Turn]) -> list[_SampledSpan]:
    """The sampled parts of the response, in order, none over another."""
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
    """The part that a turn has sampled behind the context that it was sampled in."""
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


def _observe(sample: Sample, tokens: Int32, version: int, records: list[dict[str, object]]) -> None:
    n = len(tokens)
    if n:
        sample.append(tokens.tolist(), [], [WeightSpan(version, 0, n)], trainable=False)
        records.append({"by": ENVIRONMENT, "length": n, "finish": "stop"})


def _speak(sample: Sample, part: _SampledSpan, records: list[dict[str, object]]) -> int:
    """Append a turn; the version of its last token."""
    turn, n = part.turn, part.end - part.start
    spans = [WeightSpan(s.version, s.start, min(s.end, n)) for s in turn.spans if s.start < n]
    sample.append(turn.tokens[:n].tolist(), turn.log_probs[:n].tolist(), spans)
    record = {"by": MODEL, "length": n, "finish": turn.finish if n == len(turn.tokens) else "stop"}
    records.append(record | ({"stop": turn.stop} if turn.stop else {}))
    return spans[-1].version


def _mask(sample: Sample, claim: SampleClaim) -> None:
    """Train what is claimed. Raises ClaimError."""
    wanted = np.asarray(claim.mask, dtype=np.uint8)
    strange = np.flatnonzero(wanted > sample.loss_mask)
    if len(strange):
        i = int(strange[0])
        raise ClaimError(
            f"token {i} of the response (id {int(sample.tokens[sample.prompt_length + i])}) is to "
            f"be trained, and {len(strange)} in all, but the engine has not sampled it there: "
            "expected the ids of its answer, behind the very tokens that it was asked with; mask "
            "what the function has written itself with 0"
        )
    sample.loss_mask = wanted
