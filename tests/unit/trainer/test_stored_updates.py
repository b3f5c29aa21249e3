from __future__ import annotations

import math

import pytest

from sluice.weight_store.manifest import VersionId
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice_trainer.weights.stored_updates import ids


@pytest.mark.parametrize(
    ("gauges", "expected"),
    [
        pytest.param(
            {"weights_reading": 4.0, "weights_reading_attempt": 2.0},
            {VersionId(4, 2)},
            id="a version",
        ),
        pytest.param(
            {"weights_damaged": 4.0, "weights_damaged_attempt": 2.0}, set(), id="another gauge"
        ),
        pytest.param({"weights_reading": 4.0}, set(), id="no attempt"),
        pytest.param(
            {"weights_reading": math.nan, "weights_reading_attempt": 2.0}, set(), id="nan"
        ),
        pytest.param(
            {"weights_reading": 4.0, "weights_reading_attempt": math.inf}, set(), id="infinite"
        ),
        pytest.param(
            {"weights_reading": 4.5, "weights_reading_attempt": 2.0}, set(), id="a fraction"
        ),
        pytest.param({}, set(), id="none"),
    ],
)
def test_versions_that_engines_report(gauges: dict[str, float], expected: set[VersionId]) -> None:
    assert ids([pb.LedgerEntry(gauges=gauges)], "weights_reading") == expected
