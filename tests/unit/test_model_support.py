"""The table of model support: its form, the code's own lists, and what it says of a job."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from sluice import model_support
from sluice.api import RLJobSpec
from sluice.images.processor import VISION_FAMILIES
from sluice_trainer.model.huggingface_config import FAMILIES
from tests.integration.models.checkpoints import MODEL_TYPES
from tests.integration.support_cells import Cell, Shown, updated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/models.md"
TABLE: model_support.Table = {
    "gemma3": {"fsdp": {"trains": "works"}},
    "gpt_oss": {
        "fsdp": {"trains": "works"},
        "sglang": {"serves": "fails: no sinks", "updates": "works"},
    },
    "qwen3": {"fsdp": {"trains": "works"}, "sglang": {"serves": "works", "updates": "works"}},
}


def that_works(part: str, use: str) -> set[str]:
    works = model_support.WORKS
    return {m for m in model_support.table() if model_support.outcome(m, part, use) == works}


def test_every_cell_has_a_place_and_says_what_a_test_shows() -> None:
    for model_type, parts in model_support.table().items():
        for part, uses in parts.items():
            for use, outcome in uses.items():
                assert use in model_support.uses()[part], (model_type, part, use)
                assert outcome == model_support.WORKS or model_support.reason(outcome)


def test_every_tiny_model_has_a_row() -> None:
    assert set(MODEL_TYPES.values()) == model_support.table().keys()


def test_megatron_trains_the_families_of_its_list() -> None:
    assert that_works("megatron", "trains") == set(FAMILIES)


def test_the_families_with_images_are_trained_with_them() -> None:
    assert that_works("fsdp", "images") == set(VISION_FAMILIES)


def test_the_page_has_the_table() -> None:
    page_with = runpy.run_path(str(ROOT / "tools/model_table.py"))["page_with"]
    assert PAGE.read_text() == page_with(PAGE.read_text()), "python tools/model_table.py " + str(
        PAGE
    )


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_support, "table", lambda: TABLE)


def job(**changes: Any) -> RLJobSpec:
    """Return a job on CPUs, with FSDP2 and SGLang."""
    groups = {"trainer": {"backend": "fsdp", "steps": 1, "gpusPerNode": 0}}
    groups["rollout"] = {"gpusPerReplica": 0}
    manifest = {
        "model": {"path": "model"},
        "data": {"prompts": [{"path": "train.jsonl"}]},
        "reward": {"type": "exact_match"},
        **{name: {**group, **changes.pop(name, {})} for name, group in groups.items()},
        **changes,
    }
    return RLJobSpec.model_validate(manifest)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("config", "changes", "problems", "notes"),
    [
        pytest.param({"model_type": "qwen3"}, {}, [], [], id="all of it works"),
        pytest.param(
            {"model_type": "gpt_oss"},
            {},
            [
                "model_type 'gpt_oss' (serves) does not work with rollout.engine: sglang on a CPU: "
                "no sinks"
            ],
            [],
            id="fails where the job runs",
        ),
        pytest.param(
            {"model_type": "gpt_oss"},
            {"rollout": {"gpusPerReplica": 1}},
            [],
            [
                "model_type 'gpt_oss' (serves) does not work with rollout.engine: sglang on a CPU: "
                "no sinks"
            ],
            id="may work on the job's GPUs",
        ),
        pytest.param(
            {"model_type": "qwen3"},
            {"trainer": {"lora": {"rank": 4}}},
            [],
            [
                "model_type 'qwen3' is not tested with trainer.backend: fsdp (lora): try it with a "
                "few steps first (docs/models.md lists what tests show)"
            ],
            id="one use is not tested",
        ),
        pytest.param(
            {"model_type": "llava", "text_config": {"model_type": "qwen3"}},
            {},
            [],
            [],
            id="counts as its language model",
        ),
        pytest.param(
            {"model_type": [1], "text_config": [1]},
            {},
            [],
            [
                "model_type '[1]' is not tested with trainer.backend: fsdp (trains) and "
                "rollout.engine: sglang (serves, updates): try it with a few steps first "
                "(docs/models.md lists what tests show)"
            ],
            id="no model type",
        ),
    ],
)
def test_what_it_says_of_a_job(
    config: dict[str, Any], changes: dict[str, Any], problems: list[str], notes: list[str]
) -> None:
    assert model_support.findings(job(**changes), config) == (problems, notes)


def test_a_session_writes_what_its_tests_show() -> None:
    shown = Shown(
        tested={Cell("qwen3", "fsdp", "trains"), Cell("gpt_oss", "sglang", "serves")},
        outcomes={
            Cell("qwen3", "fsdp", "trains"): ["works", ""],  # one of two tests has failed
            Cell("gpt_oss", "sglang", "serves"): ["works"],
        },
    )
    assert updated(TABLE, shown, whole=False) == {
        "gemma3": {"fsdp": {"trains": "works"}},
        "gpt_oss": {"fsdp": {"trains": "works"}, "sglang": {"serves": "works", "updates": "works"}},
        "qwen3": {"sglang": {"serves": "works", "updates": "works"}},
    }
    assert updated(TABLE, shown, whole=True) == {"gpt_oss": {"sglang": {"serves": "works"}}}
