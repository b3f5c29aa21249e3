"""Reading dashboards: their panels, their queries, the metrics that an expression names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.helm import CHART

DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
RULES = CHART / "files" / "rules.yaml"
_OURS = re.compile(
    r"\b(?:sluice_|rljob_|sglang:|vllm:|controller_runtime_|workqueue_|rest_client_|leader_election_"
    r"|process_|namespace_job\w*:)[\w:]+"
)


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """A query of a panel, with Grafana's legend format."""

    board: str
    panel: str
    expr: str
    legend: str

    @property
    def name(self) -> str:
        return f"{self.board}: {self.panel}: {self.legend}"

    def filled(self, *, namespace: str, interval: str, job: str = "", pool: str = "") -> str:
        """The expression as Grafana sends it."""
        values = {"namespace": namespace, "job": job, "pool": pool, "__rate_interval": interval}
        return re.sub(r"\$(\w+)", lambda match: values[match[1]], self.expr)


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> Iterator[PanelQuery]:
    for path in DASHBOARDS:
        for panel in panels(json.loads(path.read_text())):
            for target in panel["targets"]:
                yield PanelQuery(path.stem, panel["title"], target["expr"], target["legendFormat"])


def metrics(expr: str) -> set[str]:
    """Names of the metrics in an expression."""
    return set(_OURS.findall(re.sub(r'"[^"]*"', '""', expr)))


_OF_OPERATOR = ("rljob_", "controller_runtime_", "workqueue_", "rest_client_", "leader_election_")
_MADE_OF_THEM = (
    "namespace_job:sluice_job:state",
    "namespace_job_condition:sluice_job:true",
    "namespace_job_role:sluice_restarts:increase1h",
    "namespace_job:sluice_plan_speedup:max",
    "namespace_job_role:sluice_plan_devices:max",
)


def of_operator(query: PanelQuery) -> bool:
    """True for what only a cluster's operator tells; tests/cluster asks a real one."""
    return any(name.startswith((*_OF_OPERATOR, *_MADE_OF_THEM)) for name in metrics(query.expr))
