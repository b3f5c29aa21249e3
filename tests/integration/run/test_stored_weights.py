"""Weights go through a store, as snapshots and differences, and the workers fetch them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.weight_store.manifest import MANIFEST, VersionId, id_of, parse
from tests.integration.run.laptop import Laptop, values

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
STEPS = 6


def versions(store: Path) -> list[VersionId]:
    return sorted(
        id_ for path in store.rglob(MANIFEST) if (id_ := id_of(path.parent.name)) is not None
    )


def test_a_run_survives_its_trainer_and_its_engine(
    laptop: Callable[..., Laptop], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    run = laptop(
        f"weightSync={{transport: store, store: {{uri: {store}, snapshotEvery: 3}}}}",
        f"trainer.steps={STEPS}",
        "rollout.batchSize=16",
        "checkpoint.everySteps=2",
    )
    run.start()
    run.until(lambda: len(run.steps()) >= 2, "two steps are trained", 300)
    run.kill("trainer")
    run.until(lambda: len(run.steps()) >= 4, "the next trainer goes on", 300)
    run.kill("engine")
    assert run.wait(300) == 0, run.text()[-3000:]
    summary = run.summary()
    assert (summary["state"], summary["steps"]) == ("Succeeded", STEPS)
    assert summary["groups_trained"] == STEPS * 16
    records = list(run.steps().values())
    # The engine computes with the trainer's weights.
    assert max(values(records, "train/train_rollout_logprob_abs_diff_max")) <= 1e-4
    shares = [share for share in values(records, "perf/update_weights/delta_share") if share]
    assert shares
    assert max(shares) < 1
    present = versions(store)
    assert {id_.attempt for id_ in present} == {2}, "the first trainer's versions are removed"
    assert present[-1].version == STEPS
    [newest] = store.rglob(f"{present[-1].directory}/{MANIFEST}")
    assert parse(newest.read_bytes(), present[-1]).entry.delta_bytes
