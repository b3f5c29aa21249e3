"""`sluice list`: runs of this machine, and jobs of a cluster."""

from __future__ import annotations

import asyncio
import io
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sluice_cli.output import Format, written
from sluice_cli.status.readers import jobs_of_cluster
from sluice_client.job_list import JobSummary, cluster_job, local_jobs

COLUMNS = ("name", "where", "state", "step", "reward", "restarts", "started")


def list_text(directory: Path, namespace: str | None, *, everywhere: bool, form: Format) -> str:
    """List the runs in `directory`, newest first, then the jobs of a cluster.

    Raises ReadError if the caller names a cluster's namespace and the cluster cannot be read.
    """
    jobs = sorted(local_jobs(directory), key=lambda job: job.started or "", reverse=True)
    stored, failure = asyncio.run(jobs_of_cluster(namespace, everywhere=everywhere))
    jobs += [cluster_job(document) for document in stored]
    if form is not Format.TEXT:
        return written([job.facts() for job in jobs], form)
    text = _table(jobs) if jobs else f"no runs in {directory}/ and no jobs in a cluster"
    return f"{text}\nnote: {failure}" if failure else text


def _table(jobs: list[JobSummary]) -> str:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for job in jobs:
        facts = asdict(job) | {"step": _step(job)}
        table.add_row(*("-" if facts[name] is None else str(facts[name]) for name in COLUMNS))
    text = io.StringIO()
    Console(file=text, width=200, no_color=True).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _step(job: JobSummary) -> str | None:
    if job.step is None:
        return None
    return f"{job.step}/{job.total_steps}" if job.total_steps else str(job.step)
