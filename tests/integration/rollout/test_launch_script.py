"""The script that starts SGLang speaks the language of the release that is installed."""

from __future__ import annotations

import runpy

from sluice.engines.sglang.plugin.__main__ import PATH


def test_graphs_are_asked_for_as_this_release_spells_it() -> None:
    from sglang.srt.server_args import prepare_server_args

    script = runpy.run_path(str(PATH / "launch_server.py"))
    words = script["graph_arguments"]("400")
    parsed = prepare_server_args(["--model-path", "dummy", "--skip-tokenizer-init", *words])
    name = words[0].removeprefix("--").replace("-", "_")
    assert getattr(parsed, name) == 400
