"""The trainer's process group, which policies need."""

from __future__ import annotations

from tests.integration.trainer.conftest import process_group

__all__ = ["process_group"]
