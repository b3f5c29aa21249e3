"""FlashAttention 4 is an option: without it, or where it does not load, attention is torch's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sluice_trainer import flash


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed `flash_attn`; its folder `cute` is empty yet."""
    cute = tmp_path / "flash_attn/cute"
    cute.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    return cute / "__init__.py"


def test_without_the_package_nothing_is_said() -> None:
    with capture_logs() as lines:
        assert flash.loaded() is None
    assert not lines


def test_flash_attention_2_alone_is_not_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with capture_logs() as lines:
        assert flash.loaded() is None
    assert not lines
    sys.modules.pop("flash_attn", None)


def test_its_function_is_taken(package: Path) -> None:
    package.write_text("flash_attn_varlen_func = print\n")
    function = flash.loaded()
    assert function is not None
    assert function.__name__ == "print"
    for name in ("flash_attn.cute", "flash_attn"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import cutlass_that_is_not_there", "No module named 'cutlass_that_is_not_there'"),
        ("raise OSError('libcuda.so.1: no such file')", "libcuda.so.1"),
        ("", "flash_attn_varlen_func"),
    ],
    ids=["a part is missing", "a library is missing", "another release"],
)
def test_one_that_does_not_load_is_told_and_left(package: Path, text: str, said: str) -> None:
    package.write_text(text)
    with capture_logs() as lines:
        assert flash.loaded() is None
    (line,) = lines
    assert line["log_level"] == "warning"
    assert said in line["error"]
    for name in ("flash_attn.cute", "flash_attn"):
        sys.modules.pop(name, None)
