"""FlashAttention 4 is optional: if it is absent or does not load, attention is torch's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sluice_trainer.kernels import flash_attention


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a package of that name, with code and release."""
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")

    def write(code: str, release: str = str(flash_attention.OLDEST)) -> None:
        cute, about = tmp_path / "flash_attn/cute", tmp_path / f"flash_attn_4-{release}.dist-info"
        for directory in (cute, about):
            directory.mkdir(parents=True)
        (cute / "__init__.py").write_text(code)
        (about / "METADATA").write_text(f"Name: flash-attn-4\nVersion: {release}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    return write


@pytest.fixture(autouse=True)
def unload_flash_attn() -> Iterator[None]:
    yield
    for name in ("flash_attn.cute", "flash_attn"):
        sys.modules.pop(name, None)


def test_a_missing_package_is_not_logged() -> None:
    with capture_logs() as lines:
        assert flash_attention.loaded() is None
    assert not lines


def test_the_function_of_an_installed_package_is_used(install: Callable[..., None]) -> None:
    install("flash_attn_varlen_func = print\n")
    function = flash_attention.loaded()
    assert function is not None
    assert function.__name__ == "print"


def test_an_untested_release_is_not_used_and_logged(install: Callable[..., None]) -> None:
    install("flash_attn_varlen_func = print\n", "4.0.0b19")
    with capture_logs() as lines:
        assert flash_attention.loaded() is None
    (line,) = lines
    assert "flash-attn-4 4.0.0b19 is older than 4.0.0b36" in line["event"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import cutlass_that_is_not_there", "No module named 'cutlass_that_is_not_there'"),
        ("raise OSError('libcuda.so.1: no such file')", "libcuda.so.1"),
        ("", "flash_attn_varlen_func"),
    ],
    ids=["a part is missing", "a library is missing", "another release"],
)
def test_a_package_that_does_not_load_is_not_used_and_logged(
    install: Callable[..., None], code: str, error: str
) -> None:
    install(code)
    with capture_logs() as lines:
        assert flash_attention.loaded() is None
    (line,) = lines
    assert line["log_level"] == "warning"
    assert error in line["error"]
