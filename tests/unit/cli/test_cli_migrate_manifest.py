"""`sluice migrate-manifest`: print or rewrite a manifest of an earlier version."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from sluice_cli.main import app

GOLDEN = Path(__file__).parents[1] / "api/golden"
MIGRATED = (GOLDEN / "v0.1.migrated.yaml").read_text()


def migrate(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["migrate-manifest", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_new_text_is_printed_and_the_file_stays() -> None:
    before = (GOLDEN / "v0.1.yaml").read_text()
    assert migrate(GOLDEN / "v0.1.yaml") == (0, MIGRATED)
    assert (GOLDEN / "v0.1.yaml").read_text() == before


def test_in_place_rewrites_the_file_behind_a_link_and_keeps_its_mode(tmp_path: Path) -> None:
    file, link = tmp_path / "job.yaml", tmp_path / "link.yaml"
    file.write_text((GOLDEN / "v0.1.yaml").read_text())
    file.chmod(0o640)
    link.symlink_to(file)
    assert migrate(link, "--in-place") == (0, f"{link}: rewritten\n")
    assert file.read_text() == MIGRATED
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "link.yaml"}


def test_a_present_manifest_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(MIGRATED)
    written = file.stat().st_mtime_ns
    assert migrate(file, "--in-place") == (0, f"{file}: has no old fields\n")
    assert file.stat().st_mtime_ns == written


def test_what_cannot_be_read_is_an_error_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("kind: RLJob\nspec: {\n")
    code, output = migrate(file)
    assert code == 2
    assert f"error: {file}:3:1: not valid YAML" in output
    assert migrate(tmp_path / "none.yaml")[0] == 2
