"""Engines that keep refusing the weights of a model end the job; other failures do not."""

from __future__ import annotations

import pytest

from sluice_trainer.loop.weight_update import Refusals, refusal_text
from sluice_trainer.weights.outcome import UpdateOutcome

UNKNOWN = "transfer: /update_weights_from_distributed answered 400: no parameter vision.x"
OTHER = "transfer: /update_weights_from_distributed answered 400: another tensor"


def refused(*answers: str) -> UpdateOutcome:
    texts = {f"rollout-{n}": answer for n, answer in enumerate(answers)}
    return UpdateOutcome((), texts, {}, 0, refused=texts)


SERVED = UpdateOutcome(("rollout-0",), {}, {}, 0)
LATE = UpdateOutcome((), {"rollout-0": "pause: only this engine was late"}, {}, 0)


@pytest.mark.parametrize(
    ("updates", "ends"),
    [
        pytest.param([refused(UNKNOWN)] * 3, True, id="three times the same"),
        pytest.param([refused(UNKNOWN, UNKNOWN)] * 3, True, id="by two engines"),
        pytest.param([refused(UNKNOWN)] * 2, False, id="twice"),
        pytest.param([refused(UNKNOWN), refused(OTHER), refused(UNKNOWN)], False, id="other words"),
        pytest.param([refused(UNKNOWN), LATE, refused(UNKNOWN), LATE], False, id="or late"),
        pytest.param([LATE] * 5, False, id="late is no refusal"),
        pytest.param([SERVED, *[refused(UNKNOWN)] * 5], False, id="an engine has taken them"),
        pytest.param(
            [UpdateOutcome(("a",), {"b": UNKNOWN}, {}, 0, refused={"b": UNKNOWN})] * 4,
            False,
            id="one of two takes them",
        ),
    ],
)
def test_a_refusal_is_permanent_if_repeated_while_no_engine_takes_the_weights(
    updates: list[UpdateOutcome], ends: bool
) -> None:
    refusals = Refusals()
    answers = [refusals.permanent([update]) for update in updates]
    assert bool(answers[-1]) == ends
    assert not any(answers[:-1])
    if ends:
        assert answers[-1] == UNKNOWN


def test_a_job_whose_adapter_is_refused_says_what_works_instead() -> None:
    assert refusal_text("unknown tensor", adapter=False) == (
        "no engine takes the weights of this model; after 3 tries the engine says: unknown tensor"
    )
    assert "(weightSync.lora: merged sends all weights)" in refusal_text("no", adapter=True)
