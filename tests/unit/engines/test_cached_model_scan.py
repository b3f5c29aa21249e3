"""The plugin's cache of a model's scan, which lasts for one update."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.engines.conftest import Plugin


@pytest.fixture
def model_scan(plugin: Plugin) -> Iterator[ModuleType]:
    module = plugin("weights.cached_model_scan")
    yield module
    module.before_end()


class Model(torch.nn.Module):
    """Counts how often its parameters are listed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.walks = 0

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        self.walks += 1
        return super().named_parameters(*args, **kwargs)

    def load_weights(self) -> list[int]:
        """A bucket: which parameters it writes to."""
        return [id(parameter) for parameter in dict(self.named_parameters()).values()]


def updater_of(model: Model, quantization: str | None = None) -> Any:
    """The parts of SGLang's WeightUpdater that the plugin asks."""
    config = SimpleNamespace(quantization=quantization)
    return SimpleNamespace(get_model=lambda: model, model_config=config)


def load_buckets(model_scan: ModuleType, updater: Any, count: int = 3) -> list[list[int]]:
    written = []
    for _ in range(count):
        with model_scan.same_parameters(updater):
            written.append(updater.get_model().load_weights())
    return written


def test_parameters_are_listed_once_in_an_update(model_scan: ModuleType) -> None:
    model = Model()
    model_scan.begun()
    first, *others = load_buckets(model_scan, updater_of(model))
    assert model.walks == 1
    assert others == [first] * 2
    model_scan.before_end()
    assert load_buckets(model_scan, updater_of(model), 2) == [first] * 2
    assert model.walks == 3  # no update is announced


def test_parameters_that_are_replaced_when_an_update_begins_are_those_that_are_loaded(
    model_scan: ModuleType,
) -> None:
    model = Model()
    model_scan.begun()
    load_buckets(model_scan, updater_of(model))
    model_scan.before_end()
    model.layer = torch.nn.Linear(2, 2)
    model_scan.begun()
    written = load_buckets(model_scan, updater_of(model))
    assert written == [[id(parameter) for parameter in model.parameters()]] * 3


def test_a_quantized_model_may_replace_its_parameters_in_any_bucket(model_scan: ModuleType) -> None:
    model = Model()
    model_scan.begun()
    load_buckets(model_scan, updater_of(model, "fp8"))
    assert model.walks == 3


def test_other_questions_and_models_are_not_cached(model_scan: ModuleType) -> None:
    model, draft = Model(), Model()
    model_scan.begun()
    load_buckets(model_scan, updater_of(model))
    with model_scan.same_parameters(updater_of(model)):
        names = [name for name, _ in model.named_parameters(prefix="model")]
    assert names == ["model.layer.weight", "model.layer.bias"]
    assert load_buckets(model_scan, updater_of(draft), 1) != load_buckets(
        model_scan, updater_of(model), 1
    )
    assert "named_parameters" not in vars(model)


def test_why_a_model_may_not_be_updated_is_asked_once_in_an_update(model_scan: ModuleType) -> None:
    model, checked_models = Model(), list[Any]()

    def original(model: Any = None) -> str | None:
        checked_models.append(model)
        return "its graphs keep derived weights"

    for _ in range(2):
        model_scan.begun()
        answers = {model_scan.refusal(original, model) for _ in range(5)}
        assert answers == {"its graphs keep derived weights"}
    assert checked_models == [model] * 2
    model_scan.before_end()
    model_scan.refusal(original, model)
    model_scan.refusal(original)
    assert checked_models == [model] * 3 + [None]


def test_a_bucket_out_of_the_trainers_memory_is_loaded_the_same_way(model_scan: ModuleType) -> None:
    model = Model()
    model_scan.begun()
    for _ in range(3):
        model_scan.with_same_parameters(lambda updater: model.load_weights(), updater_of(model))
    assert model.walks == 1
