"""Metrics of an evaluation, as a pure function of the facts of every group of a data set."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sluice.telemetry.pass_rate import pass_rates, reliability
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import SampleFacts


def failed_facts(samples: int, version: int) -> list[SampleFacts]:
    """Return facts of a group that could not be finished: it counts, with reward 0."""
    return [SampleFacts(0, 0, 0, pb.SAMPLE_STATUS_FAILED, 0.0, version, version)] * samples


def metrics(groups: Sequence[Sequence[SampleFacts]], ks: Sequence[int]) -> dict[str, float]:
    """Return metrics of one data set.

    A failed sample counts as wrong, with reward 0; lengths are of samples that did not fail.
    `weight_version` is what sampled the responses; in asynchronous training it may be newer than
    the version that the evaluation was opened for.

    Parameters
    ----------
    groups
        Facts of the samples of each group.
    ks
        Numbers of samples for which pass@k and its like are computed.

    """
    samples = [fact for group in groups for fact in group]
    lengths = [f.response_length for f in samples if f.status != pb.SAMPLE_STATUS_FAILED] or [0]
    count = max(len(samples), 1)
    versions = [
        v
        for f in samples
        if f.status != pb.SAMPLE_STATUS_FAILED
        for v in (f.min_version, f.max_version)
    ] or [0]
    result = {
        "reward": sum(f.reward for f in samples) / count,
        "response_len/mean": statistics.fmean(lengths),
        "response_len/median": float(statistics.median(lengths)),
        "response_len/max": float(max(lengths)),
        "response_len/min": float(min(lengths)),
        "truncated_ratio": sum(f.status == pb.SAMPLE_STATUS_TRUNCATED for f in samples) / count,
        "failed_ratio": sum(f.status == pb.SAMPLE_STATUS_FAILED for f in samples) / count,
        "weight_version/min": float(min(versions)),
        "weight_version/max": float(max(versions)),
        "count": float(len(samples)),
        "groups": float(len(groups)),
    }
    rewards = [[f.reward for f in group] for group in groups]
    return result | pass_rates(rewards, ks) | reliability(rewards, ks)
