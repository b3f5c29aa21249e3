"""Pages and links that lead out of docs/.

The README and the manifests of examples/ become pages of the site, so that they are found by its
search. Links to everything else outside of docs/ lead to the repository, and are checked as those
between pages are.

A hook of mkdocs: https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

OVERVIEW = "overview.md"
MANIFESTS = "example-manifests.md"

_log = logging.getLogger("mkdocs.hooks.outside")
_LINK = re.compile(r"(?<=\]\()[^)\s#]+(?=[)#])")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages whose sources are not in docs/."""
    root = Path(config["docs_dir"]).parent
    if (root / "README.md").exists():
        files.append(File.generated(config, OVERVIEW, abs_src_path=str(root / "README.md")))
    if (root / "docs" / "examples.md").exists():
        files.append(File.generated(config, MANIFESTS, content=manifests(root)))
    return files


def manifests(root: Path) -> str:
    """A page with all manifests of the examples, each under its path."""
    parts = [
        "# Example manifests\n\nAll manifests of `examples/`. [Examples](examples.md) says what "
        "each of them shows and how to run it."
    ]
    for path in sorted(root.joinpath("examples").rglob("*.yaml")):
        parts.append(f"## {path.relative_to(root)}\n\n```yaml\n{path.read_text().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page's text, with links to what is no file of docs/ as URLs of the repository."""
    docs = Path(config["docs_dir"])
    source, place = page.file.abs_src_path, docs / page.file.src_uri
    here = Path(source).parent if source else docs

    def rewritten(match: re.Match[str]) -> str:
        target = (here / match[0]).resolve()
        if re.match(r"\w+:", match[0]):
            return match[0]
        if target == docs.parent / "README.md":
            target = docs / OVERVIEW
        elif not target.exists():
            _log.warning(f"Doc file '{page.file.src_path}' links to {match[0]}, which is not there")
        if target.is_relative_to(docs) and not target.is_dir():
            return os.path.relpath(target, place.parent)
        kind = "tree" if target.is_dir() else "blob"
        return f"{config['repo_url']}/{kind}/main/{target.relative_to(docs.parent)}"

    return _LINK.sub(rewritten, markdown)
