"""Arguments of SGLang's server, as the plugin's launch script reads them."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.unit.engines.conftest import Plugin


@pytest.fixture
def module(plugin: Plugin) -> ModuleType:
    return plugin("startup.arguments")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("--tp 2", "2"),
        ("--tp=2", "2"),
        ("--tp 2 --tp-size=4", "4"),
        ("--tp-size 4 --port 1 --tp 2", "2"),
        ("--port 1", ""),
        ("--port 1 --tp", ""),
    ],
)
def test_the_last_value_of_an_argument_counts(
    module: ModuleType, arguments: str, value: str
) -> None:
    assert module.last(arguments.split(), "--tp-size", "--tp") == value


def test_a_value_may_contain_what_divides_a_name_from_it(module: ModuleType) -> None:
    assert module.last(["--model-path=/models/a=b"], "--model-path") == "/models/a=b"


@pytest.mark.parametrize(("arguments", "value"), [("--tp 8", 8), ("--tp eight", 1), ("", 1)])
def test_a_value_that_is_not_a_number_gives_the_default(
    module: ModuleType, arguments: str, value: int
) -> None:
    assert module.number(arguments.split(), 1, "--tp") == value


@pytest.mark.parametrize(
    ("arguments", "there"), [("--saver", True), ("--saver=true", True), ("--saver-2", False)]
)
def test_a_flag_is_there_with_or_without_a_value(
    module: ModuleType, arguments: str, there: bool
) -> None:
    assert module.has(arguments.split(), "--saver") is there
