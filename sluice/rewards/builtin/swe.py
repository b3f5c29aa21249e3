"""Whether a patch resolves an issue, as SWE-bench decides (Jimenez et al. 2024).

A row has the names of its tests: `FAIL_TO_PASS`, which the patch has to repair, and `PASS_TO_PASS`,
which it must not break. The tests have been run by the verifier of the job
(`rollout.environment.verifier`), which leaves their output as `test_log` in its metadata. A test
that the output does not name has not passed.
"""

from __future__ import annotations

import json
from typing import Any

from sluice.rewards.builtin.swe_logs import PARSERS, Outcome, Outcomes
from sluice.rewards.types import RewardError, RewardInput, shown

_LOG, _PARSER = "test_log", "log_parser"


def swe(sample: RewardInput) -> dict[str, float]:
    """Return the score (1 if all tests pass, else 0) and the share of each list that passes."""
    fail_to_pass, pass_to_pass = (_names(sample, key) for key in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    if not fail_to_pass:
        raise RewardError("metadata.FAIL_TO_PASS: swe needs at least one test, the row has none")
    outcomes = _outcomes(sample)
    repaired, kept = _share(fail_to_pass, outcomes), _share(pass_to_pass, outcomes)
    return {
        "score": float(repaired == kept == 1.0),
        "fail_to_pass": repaired,
        "pass_to_pass": kept,
    }


def _names(sample: RewardInput, key: str) -> list[str]:
    """Return a list of tests. It may be a JSON text, as in SWE-bench's files."""
    found: Any = sample.metadata.get(key)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise RewardError(
                f"metadata.{key}: expected a list of tests, or its JSON, found "
                f"{shown(sample.metadata[key])}"
            ) from error
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise RewardError(
            f"metadata.{key}: expected a list of names of tests, found {shown(found)}"
        )
    return found


def _outcomes(sample: RewardInput) -> Outcomes:
    name = sample.metadata.get(_PARSER, "pytest")
    parser = PARSERS.get(name) if isinstance(name, str) else None
    if parser is None:
        raise RewardError(
            f"metadata.{_PARSER}: expected one of {', '.join(PARSERS)}, found {shown(name)}"
        )
    log = sample.metadata.get(_LOG)
    if not isinstance(log, str):
        raise RewardError(
            f"metadata.{_LOG}: expected the output of the tests, found {shown(log)}: the verifier "
            "of rollout.environment has to leave it in its result.json"
        )
    return parser(log)


def _share(names: list[str], outcomes: Outcomes) -> float:
    """Return the share of tests that have passed; 1 of an empty list."""
    passed = sum(outcomes.get(name) is Outcome.PASSED for name in names)
    return passed / len(names) if names else 1.0
