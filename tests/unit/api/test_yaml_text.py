"""Files that stand for more than they say are refused at their place; what a job may
need is not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.api import ManifestError, load_job, parse_documents
from sluice.api.schema.yaml_text import MAX_BYTES, MAX_DEPTH, MAX_VALUES
from sluice.data.files import read_file
from sluice.runtime.pod_env import ConfigurationError
from sluice_cli.main import app

LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGES = "a0: &a0 {k0: 1}\n" + "".join(
    f"a{n}: &a{n} {{k{n}: 1, <<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10)
)
QUADRATIC = f"a: &a [{', '.join('0' * 3000)}]\nb: [{', '.join(['*a'] * 3000)}]\n"
SELF = "a: 1\nb: &b\n  - c: *b\n"
BOMBS = [
    pytest.param(
        LAUGHS,
        r":5:\d+: up to here, with what its aliases stand for, more than 20,000 values",
        id="laughs",
    ),
    pytest.param(
        MERGES,
        r":5:\d+: up to here, with what its aliases stand for, more than 20,000 values",
        id="merges",
    ),
    pytest.param(
        QUADRATIC, r":2:\d+: up to here, with what its aliases stand for, more than", id="quadratic"
    ),
    pytest.param(SELF, r":3:8: \*b is inside of what it stands for", id="itself"),
    pytest.param(
        "a:\n  " + "[" * 100_000, r":2:52: nested more than 50 levels deep", id="brackets"
    ),
    pytest.param("a: " + "{a: " * 100_000, r":1:\d+: nested more than 50 levels deep", id="braces"),
    pytest.param("- " * 100_000, r":1:101: nested more than 50 levels deep", id="dashes"),
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("text", "message"), BOMBS)
def test_validate_names_the_place_beyond_a_limit(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError, match=f"^{path}{message}") as raised:
        load_job(path)
    assert len(str(raised.value).splitlines()) == 1
    result = CliRunner().invoke(app, ["validate", str(path)])
    assert result.exit_code == 2
    assert "job.yaml:" in result.output


@pytest.mark.timeout(30)
def test_the_limits_apply_to_overrides(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("apiVersion: sluice.dev/v1alpha1\nkind: RLJob\nspec: {}\n")
    with pytest.raises(
        ManifestError, match=r"^--set trainer.steps:1:51: nested more than 50 levels deep"
    ):
        load_job(path, ["trainer.steps=" + "[" * 100_000])


@pytest.mark.timeout(30)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_the_limits_apply_to_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train.{suffix}"
    path.write_text("[" * 100_000)
    with pytest.raises(
        ConfigurationError, match=f"^{path}:1(:2)?: not valid JSON: nested too deeply$"
    ):
        list(read_file(path))


@pytest.mark.parametrize(
    ("value", "message"),
    [("9" * 5000, "Exceeds the limit"), ("2026-13-01", "month must be in 1..12")],
    ids=["digits", "date"],
)
def test_values_that_python_cannot_hold_are_refused(value: str, message: str) -> None:
    with pytest.raises(ManifestError, match=f"^job.yaml: not valid YAML: {message}"):
        parse_documents(f"a: {value}\n", "job.yaml")


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_number_of_a_row_that_python_cannot_hold_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train.{suffix}"
    path.write_text('[{"a": ' + "9" * 5000 + "}]")
    with pytest.raises(
        ConfigurationError, match=f"^{path}:1(:2)?: not valid JSON: Exceeds the limit"
    ):
        list(read_file(path))


def test_a_file_that_is_no_manifest_is_not_read_to_its_end() -> None:
    with pytest.raises(
        ManifestError, match=f"^/dev/zero: more than {MAX_BYTES >> 10} KiB; expected an RLJob"
    ):
        load_job(Path("/dev/zero"))


def test_a_text_within_the_limits_is_read() -> None:
    text = (
        "kind: RLJob\nbase: &base {image: x}\nspec: [*base, *base, {<<: *base, name: "
        "y}]\n---\nspec: &base [1]\n"
    )
    first, second = parse_documents(text, "job.yaml")
    assert first["spec"] == [{"image": "x"}, {"image": "x"}, {"image": "x", "name": "y"}]
    assert second["spec"] == [1]
    deep = "a: " + "[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1)
    assert len(parse_documents(deep, "job.yaml")) == 1


def test_an_anchor_that_is_redefined_counts_with_its_last_value() -> None:
    wide = ", ".join("0" * 1000)
    text = f"a: &a [{wide}]\nb: &a 1\nc: [{', '.join(['*a'] * 1000)}]\n"
    assert MAX_VALUES < 1000 * 1000
    [document] = parse_documents(text, "job.yaml")
    assert sum(document["c"]) == 1000
