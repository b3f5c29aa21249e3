"""Self-play on a real engine and a real buffer: seats from the gateway to their advantages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from sluice.api import Algorithm
from sluice.engines.protocol import Client
from sluice.samples.sample import SampleGroup
from sluice.samples.turns import turn_rewards
from sluice.telemetry.rollouts import read, write
from sluice.wire import codec
from sluice_trainer.algorithms.estimators import Responses, estimate
from sluice_trainer.batch import credit
from sluice_trainer.batch.estimator_inputs import unit_key
from sluice_trainer.batch.sequences import TrainSequence
from tests.integration.engines import distance, log_probs, tolerance
from tests.integration.rollout.pods import Services
from tests.integration.rollout.rock_paper_scissors import ROUNDS, TOKENS
from tests.integration.rollout.test_gateway import READY
from tests.integration.rollout.test_gateway import talkative as talkative

GAME = {
    "rollout__function": "tests.integration.rollout.rock_paper_scissors.play",
    "rollout__seats": [{"name": "white"}, {"name": "black"}],
    "rollout__sampling__maxResponseTokens": 100,
    "rollout__dynamicFilter": "nonzero_std",
}


def advantages(group: SampleGroup) -> dict[tuple[int, str], float]:
    """Estimate the advantage of each seat of each sample, as the trainer does."""
    samples = {s.index: s for s in group.samples}
    units = [
        unit for s in group.samples for unit in credit.units_of_sample((group.group_id, s.index), s)
    ]
    place = {unit.key: i for i, unit in enumerate(units)}
    sequences = [
        t for s in samples.values() for t in TrainSequence.from_sample(group.group_id, s, 0.0)
    ]
    masks = [torch.tensor(sequence.loss_mask) for sequence in sequences]
    estimates = estimate(
        Responses(
            rewards=torch.tensor([unit.reward for unit in units]),
            groups=torch.tensor(credit.groups_of(units)),
            own=torch.tensor([place[unit_key(sequence)] for sequence in sequences]),
            masks=masks,
            kl=[torch.zeros(len(mask)) for mask in masks],
        ),
        Algorithm(normalize_std=False),
    )
    rows = zip(sequences, estimates.advantages, strict=True)
    return {(sequence.index, sequence.seat): float(row[0]) for sequence, row in rows}


async def test_a_game_of_zero_sum_is_trained_seat_by_seat(
    make_services: Callable[..., Services],
    engine: Client,
    model: Path,
    talkative: Path,
    tmp_path: Path,
) -> None:
    """All episodes have reward 0, so filter and baseline have to look at seats."""
    services = make_services(**GAME, model__path=str(talkative))
    async with await services.start_buffer() as client, services.working(engine) as (_, end):
        assert (await client.take(1, wait=60)).state == READY
        groups = [codec.group_from_message(g) for g in await client.shard(1)]
        await end()
    for group in groups:
        estimated = advantages(group)
        scores = [sample.metadata["score"] for sample in group.samples]
        assert len(set(scores)) > 1, "the filter keeps prompts whose games ended differently"
        for sample, score in zip(group.samples, scores, strict=True):
            # the outcome, and half of it again round by round
            assert sample.seat_rewards == {"white": 1.5 * score, "black": -1.5 * score}
            assert sample.reward == 0
            lead = 1.5 * (score - sum(scores) / len(scores))
            assert estimated[sample.index, "white"] == -estimated[sample.index, "black"] == lead
            assert {seat: len(rewards) for seat, rewards in turn_rewards(sample).items()} == {
                "white": ROUNDS,
                "black": ROUNDS,
            }
            assert [int(s.loss_mask.sum()) for s in sample.sequences] == [ROUNDS * TOKENS] * 2
    for sequence in groups[0].samples[0].sequences:
        trained = sequence.loss_mask.astype(bool)
        expected = log_probs(model, sequence.tokens.tolist(), sequence.response_length)
        expected = [e for e, is_trained in zip(expected, trained, strict=True) if is_trained]
        reported = sequence.rollout_log_probs[trained].tolist()
        assert distance(reported, expected) < tolerance()
    kept = read(write(tmp_path, 1, groups))
    assert [advantages(group) for group in kept] == [advantages(group) for group in groups]
