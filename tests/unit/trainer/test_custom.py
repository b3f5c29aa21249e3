"""User-defined estimators and losses are loaded by dotted path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.api import Algorithm
from sluice.api.groups.losses import Loss
from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.algorithms import custom


def test_without_a_path_there_is_no_function() -> None:
    assert custom.estimator(Algorithm()) is None
    assert custom.loss(Algorithm()) is None


def test_functions_are_found_by_their_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def advantages(r, a):\n    return 1\ndef loss(p, e, i, a):\n    return 2\n"
    )
    algorithm = Algorithm(
        estimator="custom",
        function=f"{tmp_path}/mine.py:advantages",
        loss=Loss(function=f"{tmp_path}/mine.py:loss"),
    )
    estimator, loss = custom.estimator(algorithm), custom.loss(algorithm)
    assert estimator is not None
    assert loss is not None
    nothing: Any = None
    answers: tuple[Any, Any] = (
        estimator(nothing, algorithm),
        loss(nothing, nothing, nothing, algorithm),
    )
    assert answers == (1, 2)


def test_a_missing_file_is_named_with_its_field(tmp_path: Path) -> None:
    algorithm = Algorithm(loss=Loss(function=f"{tmp_path}/none.py:loss"))
    with pytest.raises(
        ConfigurationError, match=r"spec\.algorithm\.loss\.function: .*there is no file"
    ):
        custom.loss(algorithm)
