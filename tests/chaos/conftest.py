from __future__ import annotations

from tests.integration.run.conftest import example

__all__ = ["example"]
