"""docs/migration.md names settings that the import translates, and fields of the API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from sluice.api import RLJobSpec
from sluice_migrate.slime import importer as slime
from sluice_migrate.slime import learning
from sluice_migrate.slime import sft as slime_sft
from sluice_migrate.slime.table import SLIME
from sluice_migrate.translation import Field, Table, Unsupported
from sluice_migrate.verl import algorithm, data, engines, reward
from sluice_migrate.verl import importer as verl
from sluice_migrate.verl import sft as verl_sft
from sluice_migrate.verl.table import VERL

PAGE = Path(__file__).parents[3] / "docs/migration.md"


def rows(heading: str) -> list[tuple[list[str], list[str]]]:
    """Return (names, fields) of each row in the table under a heading."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return [
        (re.findall("`([^`]+)`", names), re.findall("`([^`]+)`", fields)) for names, fields in cells
    ]


def model_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(
        (model for inner in getattr(annotation, "__args__", ()) if (model := model_of(inner))), None
    )


def exists(path: str) -> bool:
    model: Any = RLJobSpec
    for part in path.split("."):
        field = (
            next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
            if model
            else None
        )
        if field is None:
            return False
        model = model_of(field.annotation)
    return True


@pytest.mark.parametrize("heading", ["Arguments of slime", "Keys of verl"])
def test_every_field_of_the_page_exists(heading: str) -> None:
    listed = rows(heading)
    assert len(listed) > 20
    assert [field for _, fields in listed for field in fields if not exists(field)] == []


@pytest.mark.parametrize(
    ("heading", "table", "modules"),
    [
        ("Arguments of slime", SLIME, (slime, learning, slime_sft)),
        (
            "Keys of verl",
            VERL,
            (verl, algorithm, data, engines, reward, verl_sft),
        ),
    ],
)
def test_every_name_of_the_page_is_translated(
    heading: str, table: Table, modules: tuple[Any, ...]
) -> None:
    code = "".join(Path(module.__file__).read_text() for module in modules)
    code = code.replace("{_ACTOR}", "actor_rollout_ref.actor").replace(
        "{_ROLLOUT}", "actor_rollout_ref.rollout"
    )
    code = code.replace("{_CORRECTION}", "algorithm.rollout_correction")
    code = code.replace("{prefix}", "custom_reward_function")
    documented = [name for names, _ in rows(heading) for name in names]
    untranslated = [
        n
        for n in documented
        if n not in table.entries and f'"{n}"' not in code and not n.startswith("--sglang-")
    ]
    assert untranslated == []
    lost = [n for n in documented if isinstance(table.entries.get(n), Unsupported)]
    assert lost == []


@pytest.mark.parametrize("table", [SLIME, VERL], ids=["slime", "verl"])
def test_every_path_of_a_table_is_a_field(table: Table) -> None:
    paths = [entry.path for entry in table.entries.values() if isinstance(entry, Field)]
    paths += [path for path, _, _ in table.defaults]
    assert [
        path for path in paths if not exists(path) and not path.startswith("rollout.engineArgs.")
    ] == []


@pytest.mark.parametrize("table", [SLIME, VERL], ids=["slime", "verl"])
def test_a_default_is_written_out_only_if_it_differs(table: Table) -> None:
    """Keep the list of other defaults true."""
    from sluice.api import RLJob

    spec = {
        "model": {"path": "m"},
        "data": {"prompts": [{"path": "p"}]},
        "reward": {"type": "f1"},
        "trainer": {"steps": 1},
    }
    whole = RLJob.model_validate({"metadata": {"name": "x"}, "spec": spec}).model_dump(
        by_alias=True
    )["spec"]
    for path, value, _ in table.defaults:
        default: Any = whole
        for part in path.split("."):
            default = default[part]
        assert default != value, path
