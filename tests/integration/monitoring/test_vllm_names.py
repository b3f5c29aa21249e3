"""A real vLLM server exports the metrics that panels name; test_watched_run checks SGLang."""

from __future__ import annotations

import re
import urllib.request

import pytest

from tests.boards import metrics, queries
from tests.integration.conftest import Server

NAMED = {name for query in queries() for name in metrics(query.expr) if name.startswith("vllm:")}


@pytest.mark.parametrize("server", [pytest.param("vllm", marks=pytest.mark.vllm)], indirect=True)
def test_vllm_exports_what_panels_ask_it_for(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        exported = set(re.findall(r"^(vllm:\w+)\{", answer.read().decode(), re.MULTILINE))
    assert NAMED
    assert NAMED - exported == set()
