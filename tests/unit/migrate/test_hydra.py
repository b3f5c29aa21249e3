"""Hydra files and overrides that expand to far more than they say are refused."""

from __future__ import annotations

import pytest

from sluice_migrate.draft import ImportFailedError
from sluice_migrate.verl.hydra import from_yaml, value_of
from tests.unit.api.test_yaml_text import BOMBS


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("text", "message"), BOMBS)
def test_an_import_says_where_a_file_goes_too_far(text: str, message: str) -> None:
    with pytest.raises(ImportFailedError, match=f"^config.yaml{message}"):
        from_yaml(text, "config.yaml")


@pytest.mark.timeout(30)
def test_an_override_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ImportFailedError, match="nested more than 50 levels deep"):
        value_of("[" * 100_000)
