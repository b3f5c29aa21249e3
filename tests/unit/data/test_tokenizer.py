"""A tokenizer that cannot be loaded is a mistake of the job: no restart cures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.data.chat import load_tokenizer
from sluice.environment import ConfigurationError


@pytest.mark.parametrize(
    "content", ['{"a": 1}', "{", '{"model": {}}', '{"version": "1.0", "added_tokens": 3}']
)
def test_a_broken_tokenizer_is_a_configuration_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigurationError, match=f"^{tmp_path} has no usable tokenizer: "):
        load_tokenizer(tmp_path)


def test_an_empty_directory_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"^{tmp_path} has no tokenizer$"):
        load_tokenizer(tmp_path)
