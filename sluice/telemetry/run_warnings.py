"""Warnings about a run, and the steps at which they held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunWarning:
    """A sign that something is wrong with a run.

    Attributes
    ----------
    kind
        What is wrong, in two or three words. A run has one warning of each kind.
    text
        What was seen when it last held, and what to try.
    active
        True if it holds at the newest step; False if it is history.
    first_step, last_step
        First and last step at which it held. None if it concerns the run as a whole.

    """

    kind: str
    text: str
    active: bool = True
    first_step: int | None = None
    last_step: int | None = None

    @property
    def steps(self) -> str:
        """`step 3` or `steps 3-40`; empty if the warning concerns the run as a whole."""
        if self.first_step is None:
            return ""
        if self.first_step == self.last_step:
            return f"step {self.first_step}"
        return f"steps {self.first_step}-{self.last_step}"

    def sentence(self) -> str:
        """The text with the steps in front of it."""
        return f"{self.steps}: {self.text}" if self.steps else self.text

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ordered(warnings: Iterable[RunWarning]) -> list[RunWarning]:
    """Sort warnings: active ones first, each part by the step at which it began."""
    return sorted(warnings, key=lambda warning: (not warning.active, warning.first_step or 0))
