"""Grafana dashboards: fleet, job, weights and engines, pools, operator and buffer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from observability.dashboards import engines, fleet, job, operator, pools

_ALL = (fleet, job, engines, pools, operator)


def documents() -> Mapping[str, dict[str, Any]]:
    """Return the dashboards in Grafana's JSON model, by file name without its suffix."""
    boards = [module.dashboard().build() for module in _ALL]
    texts = (json.dumps(board, cls=JSONEncoder, sort_keys=True) for board in boards)
    parsed = [json.loads(text) for text in texts]
    return {document["uid"].removeprefix("sluice-"): document for document in parsed}
