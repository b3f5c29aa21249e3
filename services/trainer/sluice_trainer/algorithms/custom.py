"""User-defined estimators and losses: `algorithm.function` and `algorithm.loss.function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sluice.api import Algorithm
from sluice.runtime.pod_env import ConfigurationError
from sluice.runtime.user_code import LoadError, load
from sluice_trainer.algorithms.estimators import CustomEstimator
from sluice_trainer.algorithms.objective import CustomLoss


def estimator(algorithm: Algorithm) -> CustomEstimator | None:
    """Load the function of `algorithm.function`; None if it is not set.

    Raises
    ------
    ConfigurationError
        It cannot be loaded.

    """
    return _load("function", algorithm.function) if algorithm.function else None


def loss(algorithm: Algorithm) -> CustomLoss | None:
    """Load the function of `algorithm.loss.function`; None if it is not set.

    Raises
    ------
    ConfigurationError
        It cannot be loaded.

    """
    function = algorithm.loss.function
    return _load("loss.function", function) if function else None


def _load(field: str, dotted: str) -> Callable[..., Any]:
    try:
        return load(dotted)
    except LoadError as error:
        raise ConfigurationError(f"spec.algorithm.{field}: {error}") from error
