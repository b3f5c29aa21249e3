"""A tokenizer that cannot be loaded is an error of the job, which restarts do not fix."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.data import chat
from sluice.data.chat import DEFAULT_CONTEXT, context_length, load_tokenizer
from sluice.runtime.pod_env import ConfigurationError
from tests.integration.engines import save_model


@pytest.mark.parametrize(
    "content", ['{"a": 1}', "{", '{"model": {}}', '{"version": "1.0", "added_tokens": 3}']
)
def test_a_broken_tokenizer_is_a_configuration_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigurationError, match=f"^{tmp_path} has no usable tokenizer: "):
        load_tokenizer(tmp_path)


def test_an_empty_directory_has_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"^{tmp_path} has no tokenizer$"):
        load_tokenizer(tmp_path)


MESSAGES = [{"role": "user", "content": "w0001"}]
LOADS = """
import os, sys
from pathlib import Path
from sluice.data import chat
chat.leave_torch_out()
tokenizer = chat.load_tokenizer(Path(sys.argv[1]))
print(chat.encode(tokenizer, [{"role": "user", "content": "w0001"}], chat=True))
print("libtorch" in Path("/proc/self/maps").read_text())
print("TRANSFORMERS_NO_ADVISORY_WARNINGS" in os.environ)
"""


def test_a_process_without_torch_encodes_the_same(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=1)
    ours = chat.encode(load_tokenizer(model), MESSAGES, chat=True)
    process = subprocess.run(
        [sys.executable, "-c", LOADS, model], capture_output=True, text=True, timeout=120
    )
    assert process.stdout.splitlines() == [str(ours), "False", "False"]
    assert process.stderr == "", "nobody is told that models cannot be had"


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        pytest.param({"max_position_embeddings": 4096}, 4096, id="text"),
        pytest.param({"text_config": {"max_position_embeddings": 262144}}, 262144, id="multimodal"),
        pytest.param({"text_config": None}, DEFAULT_CONTEXT, id="not stated"),
        pytest.param({"max_position_embeddings": None}, DEFAULT_CONTEXT, id="null"),
        pytest.param([], DEFAULT_CONTEXT, id="no object"),
    ],
)
def test_the_context_is_that_of_the_language_model(
    tmp_path: Path, config: object, tokens: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(tmp_path) == tokens
