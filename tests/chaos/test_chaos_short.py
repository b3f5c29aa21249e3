"""`make test-chaos` in small: one fault of each kind over a real run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.driver import inflict_all
from tests.chaos.faults import draw

# The same faults each time: new ones are for `make test-chaos`, not for every change.
SEED = 696340
FAULTS, STEPS, LONGEST_SECONDS = 9, 60, 5.0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_survives_one_fault_of_each_kind(example: Path, tmp_path: Path) -> None:
    chosen = int(os.environ.get("SLUICE_TEST_SEED", SEED))
    print("SLUICE_TEST_SEED", chosen)
    inflict_all(draw(chosen, FAULTS, LONGEST_SECONDS), example, tmp_path, seed=chosen, steps=STEPS)
