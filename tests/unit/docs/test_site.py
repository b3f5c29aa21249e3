"""The documentation builds as a site, strictly: every page has its place, every link and anchor
leads somewhere; and a page that breaks one of these is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.pages import name_of
from tests.tools import ROOT, missing

# Links that lead to no page, and the words that must say so.
BROKEN = {
    "[other](other.md)": "'other.md'",
    "[here](#nowhere)": "contains a link '#nowhere'",
    "[there](README.md#no-heading)": "'README.md#no-heading'",
    "[out](../examples/none)": "../examples/none",
    "![picture](images/none.png)": "'images/none.png'",
}


@pytest.fixture(autouse=True)
def mkdocs() -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        missing("needs the extra `docs`: pip install -e '.[docs]'")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )


class Reader(HTMLParser):
    """Counts the tags of a page's own text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


def article(page: Path) -> str:
    return page.read_text().partition("<article")[2].partition("</article>")[0]


def test_the_pages_build_strictly_into_a_site(tmp_path: Path) -> None:
    built = build(ROOT / "mkdocs.yml", tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = sorted((ROOT / "docs").rglob("*.md"))
    for page in pages:
        folder = page.relative_to(ROOT / "docs").with_suffix("")
        parent = folder.parent if folder.name == "README" else folder
        text = article(tmp_path / parent / "index.html")
        reader = Reader()
        reader.feed(text)
        rows = re.findall(r"^\| ?-|^\|-", page.read_text(), re.MULTILINE)
        assert reader.tags.count("table") == len(rows), f"a table of {name_of(page)} is no table"
        assert "<p>- " not in text, f"a list of {name_of(page)} is no list: an empty line before it"
    index = json.loads((tmp_path / "search/search_index.json").read_text())
    searchable = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"overview/", "example-manifests/", "results/weight-sync/"} <= searchable
    overview = article(tmp_path / "overview/index.html")
    assert 'href="../your-own-task/"' in overview, "the README's links lead to pages"
    assert 'rel="next"' in (tmp_path / "concepts/index.html").read_text()


def test_links_out_of_the_pages_lead_to_the_repository(tmp_path: Path) -> None:
    config = small_site(tmp_path, "[quickstart](../examples/quickstart) [file](../file.txt#L3)")
    built = build(config, tmp_path / "site")
    assert built.returncode == 0, built.stdout + built.stderr
    text = article(tmp_path / "site/index.html")
    assert 'href="https://github.com/sluice-dev/sluice/tree/main/examples/quickstart"' in text
    assert 'href="https://github.com/sluice-dev/sluice/blob/main/file.txt#L3"' in text


def test_what_leads_nowhere_or_has_no_place_is_refused(tmp_path: Path) -> None:
    config = small_site(tmp_path, "\n\n".join(BROKEN))
    (tmp_path / "docs/lost.md").write_text("# Lost\n")
    built = build(config, tmp_path / "site")
    said = built.stdout + built.stderr
    assert built.returncode != 0
    assert [words for words in BROKEN.values() if words not in said] == [], said
    assert re.search(r'not included in the "nav".*\n.*lost.md', said), said


def small_site(directory: Path, text: str) -> Path:
    """A site of one page with our settings; its configuration."""
    (directory / "docs").mkdir()
    (directory / "examples/quickstart").mkdir(parents=True)
    (directory / "file.txt").touch()
    (directory / "docs/README.md").write_text(f"# Page\n\n{text}\n")
    config = directory / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\n"
        f"hooks: [{ROOT / 'docs/.site/outside.py'}]\n"
        "nav: [README.md]\n"
    )
    return config
