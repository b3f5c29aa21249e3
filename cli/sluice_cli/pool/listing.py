"""`sluice pool list`: the pools of this machine, with the engines that answer."""

from __future__ import annotations

import asyncio
from typing import Any

from sluice_cli.output import Format, written
from sluice_client.pool_list import answering_engines
from sluice_operator.cluster.local import pools
from sluice_operator.cluster.local.pools import RunningPool


def list_text(form: Format) -> str:
    """Return the pools that run on this machine, by name."""
    found = pools.running()
    entries = list(map(_entry, found, asyncio.run(answering_engines(found))))
    if form is not Format.TEXT:
        return written(entries, form)
    if not entries:
        return "no pool runs on this machine; sluice pool up starts one"
    return "\n".join(
        f"{entry['name']}: {entry['model']}, {entry['ready']} of {len(entry['engines'])} engine(s) "
        f"answer ({', '.join(entry['engines'])}), process {entry['pid']}, logs in {entry['logs']}"
        for entry in entries
    )


def _entry(pool: RunningPool, answering: int) -> dict[str, Any]:
    return {
        "name": pool.name,
        "model": pool.spec.model.path,
        "engines": pool.urls,
        "ready": answering,
        "pid": pool.pid,
        "logs": str(pool.logs),
    }
