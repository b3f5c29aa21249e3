from __future__ import annotations

import math

import pytest

from sluice.weight_store.manifest import VersionId
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.weights.stored_updates import ids


@pytest.mark.parametrize(
    ("gauges", "expected"),
    [
        ({"weights_reading": 4.0, "weights_reading_attempt": 2.0}, {VersionId(4, 2)}),
        ({"weights_damaged": 4.0, "weights_damaged_attempt": 2.0}, set()),
        ({"weights_reading": 4.0}, set()),
        ({"weights_reading": math.nan, "weights_reading_attempt": 2.0}, set()),
        ({"weights_reading": 4.0, "weights_reading_attempt": math.inf}, set()),
        ({"weights_reading": 4.5, "weights_reading_attempt": 2.0}, set()),
        ({}, set()),
    ],
)
def test_versions_that_engines_report(gauges: dict[str, float], expected: set[VersionId]) -> None:
    assert ids([pb.LedgerEntry(gauges=gauges)], "weights_reading") == expected
