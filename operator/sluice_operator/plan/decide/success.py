"""The job has succeeded when every trainer pod of the present attempt has done its work."""

from __future__ import annotations

from sluice_operator.plan.facts.model import Gang, GangFacts


def has_succeeded(gang: Gang, facts: GangFacts) -> bool:
    """Exit code 0 of all trainer pods.

    Trainer success ends the job: nobody is left who wants samples.
    """
    return gang.role == "trainer" and facts.succeeded == gang.size and facts.failure is None
