"""The part of our plugin that looks a model up once in an update, and not for every bucket."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.rollout.conftest import Plugin


@pytest.fixture
def once(plugin: Plugin) -> Iterator[ModuleType]:
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


def load_buckets(once: ModuleType, updater: Any, count: int = 3) -> list[list[int]]:
    written = []
    for _ in range(count):
        with once.same_parameters(updater):
            written.append(updater.get_model().load_weights())
    return written


def test_parameters_are_listed_once_in_an_update(once: ModuleType) -> None:
    model = Model()
    once.begun()
    first, *others = load_buckets(once, updater_of(model))
    assert model.walks == 1
    assert others == [first] * 2
    once.before_end()
    assert load_buckets(once, updater_of(model), 2) == [first] * 2
    assert model.walks == 3  # nobody says that an update is under way


def test_parameters_that_are_replaced_when_an_update_begins_are_those_that_are_loaded(
    once: ModuleType,
) -> None:
    model = Model()
    once.begun()
    load_buckets(once, updater_of(model))
    once.before_end()
    model.layer = torch.nn.Linear(2, 2)
    once.begun()
    written = load_buckets(once, updater_of(model))
    assert written == [[id(parameter) for parameter in model.parameters()]] * 3


def test_a_quantized_model_may_replace_its_parameters_in_any_bucket(once: ModuleType) -> None:
    model = Model()
    once.begun()
    load_buckets(once, updater_of(model, "fp8"))
    assert model.walks == 3


def test_other_questions_and_models_are_answered_as_ever(once: ModuleType) -> None:
    model, draft = Model(), Model()
    once.begun()
    load_buckets(once, updater_of(model))
    with once.same_parameters(updater_of(model)):
        names = [name for name, _ in model.named_parameters(prefix="model")]
    assert names == ["model.layer.weight", "model.layer.bias"]
    assert load_buckets(once, updater_of(draft), 1) != load_buckets(once, updater_of(model), 1)
    assert "named_parameters" not in vars(model)


def test_why_a_model_may_not_be_updated_is_asked_once_in_an_update(once: ModuleType) -> None:
    model, asked = Model(), list[Any]()

    def original(model: Any = None) -> str | None:
        asked.append(model)
        return "its graphs keep derived weights"

    for _ in range(2):
        once.begun()
        answers = {once.refusal(original, model) for _ in range(5)}
        assert answers == {"its graphs keep derived weights"}
    assert asked == [model] * 2
    once.before_end()
    once.refusal(original, model)
    once.refusal(original)
    assert asked == [model] * 3 + [None]


def test_a_bucket_out_of_the_trainers_memory_is_loaded_the_same_way(once: ModuleType) -> None:
    model = Model()
    once.begun()
    for _ in range(3):
        once.with_same_parameters(lambda updater: model.load_weights(), updater_of(model))
    assert model.walks == 1
