from __future__ import annotations

import pytest

from sluice.weight_store.manifest import VersionId
from sluice_rollout.stored_weights import NOTHING, is_newer


@pytest.mark.parametrize(
    ("held", "loaded", "expected"),
    [
        pytest.param((4, 1), None, True, id="the first weights"),
        pytest.param((4, 1), NOTHING, True, id="after a failure"),
        pytest.param((4, 1), (3, 1), True, id="the next version"),
        pytest.param((4, 1), (4, 1), False, id="the same version"),
        pytest.param((3, 1), (4, 1), False, id="round a damaged delta"),
        pytest.param((3, 2), (4, 1), True, id="a trainer that continues from a checkpoint"),
    ],
)
def test_an_engine_loads_only_what_is_newer(
    held: tuple[int, int], loaded: tuple[int, int] | None, expected: bool
) -> None:
    before = None if loaded is None else VersionId(*loaded)
    assert is_newer(VersionId(*held), before) == expected
