"""slime.utils.misc: functions by dotted path."""

from __future__ import annotations

import importlib
from typing import Any


def load_function(path: str) -> Any:
    """Import the object `package.module.name`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
