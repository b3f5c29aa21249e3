"""trainer.colocate: how many engines there are, and what leaves the GPUs in their turn. Its rules:
algorithm_cases."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.api import RLJobSpec
from tests.algorithm_cases import manifest


def spec(trainer: dict[str, Any], **rollout: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(
        manifest({}, {"trainer": {"steps": 1, **trainer}, "rollout": rollout})
    )


@pytest.mark.parametrize(
    ("trainer", "rollout", "engines"),
    [
        ({"colocate": True}, {}, 1),
        ({"colocate": True, "nodes": 2, "gpusPerNode": 8}, {"gpusPerReplica": 2}, 8),
        ({"colocate": True, "gpusPerNode": 0}, {"gpusPerReplica": 0}, 1),
        ({"colocate": True, "gpusPerNode": 0}, {"gpusPerReplica": 0, "replicas": 3}, 3),
        ({"nodes": 2, "gpusPerNode": 8}, {"gpusPerReplica": 2}, 1),
        # As an API server stores it: the default is written out.
        ({"colocate": True, "gpusPerNode": 8}, {"gpusPerReplica": 2, "replicas": 1}, 4),
        ({}, {"replicas": 5}, 5),
    ],
    ids=str,
)
def test_engines_fill_the_gpus_that_they_share(
    trainer: dict[str, Any], rollout: dict[str, Any], engines: int
) -> None:
    assert spec(trainer, **rollout).replicas == engines


@pytest.mark.parametrize(
    ("trainer", "rollout", "what"),
    [
        ({}, {}, "none"),
        ({"colocate": True}, {}, "all"),
        ({"colocate": True, "offload": "optimizer"}, {}, "optimizer"),
        ({"colocate": True, "offload": "none"}, {}, "none"),
        ({"colocate": True, "gpusPerNode": 0}, {"gpusPerReplica": 0}, "none"),
        ({"colocate": True, "gpusPerNode": 0, "offload": "all"}, {"gpusPerReplica": 0}, "all"),
    ],
    ids=str,
)
def test_parts_of_the_trainer_move_to_host_memory_while_engines_generate(
    trainer: dict[str, Any], rollout: dict[str, Any], what: str
) -> None:
    assert spec(trainer, **rollout).trainer.offloaded == what
