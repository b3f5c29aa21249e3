from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest

from sluice.engines.sglang.plugin.__main__ import PATH

Plugin = Callable[[str], ModuleType]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Plugin:
    """Import the plugin's modules by name, from the directory that SGLang gets."""
    monkeypatch.syspath_prepend(str(PATH))
    return lambda name: importlib.import_module(f"sluice_sglang.{name}")
