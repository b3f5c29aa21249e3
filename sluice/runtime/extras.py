"""Optional parts of the distribution: how to install one that is missing."""

from __future__ import annotations

import json
from importlib import metadata
from urllib.parse import unquote, urlparse

DISTRIBUTION = "sluice-rl"


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from the checkout if sluice runs from one."""
    try:
        origin = json.loads(
            metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}"
        )
    except metadata.PackageNotFoundError:
        origin = {}
    if origin.get("dir_info", {}).get("editable"):
        return f"pip install -e '{unquote(urlparse(origin['url']).path)}[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"
