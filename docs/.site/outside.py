"""Links of a page to what is no page (examples, charts, directories) lead to the repository on
the site, and are checked as those between pages are.

A hook of mkdocs: https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_log = logging.getLogger("mkdocs.hooks.outside")
_LINK = re.compile(r"(?<=\]\()[^)\s#]+(?=[)#])")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page's text, with links to what is no file of docs/ as URLs of the repository."""
    docs = Path(config["docs_dir"])
    here = Path(page.file.abs_src_path).parent

    def rewritten(match: re.Match[str]) -> str:
        target = (here / match[0]).resolve()
        in_docs = target.is_relative_to(docs) and not target.is_dir()
        if in_docs or re.match(r"\w+:", match[0]):
            return match[0]
        if not target.exists():
            _log.warning(f"Doc file '{page.file.src_path}' links to {match[0]}, which is not there")
        kind = "tree" if target.is_dir() else "blob"
        return f"{config['repo_url']}/{kind}/main/{target.relative_to(docs.parent)}"

    return _LINK.sub(rewritten, markdown)
