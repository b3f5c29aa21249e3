"""An engine's own loader says where it keeps a checkpoint's matrices."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from sluice.engines.sglang.plugin.__main__ import PATH

SHAPES = {"q": (4, 6), "k": (2, 6), "v": (2, 6), "o": (6, 4)}


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PATH))
    return import_module("sluice_sglang.weights.parameter_places")


class Rank:
    """One of two ranks that join q, k and v, and have half of each."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.parameters = {
            "qkv": Parameter(torch.randn(4, 6).bfloat16(), requires_grad=False),
            "o": Parameter(torch.randn(6, 2).bfloat16(), requires_grad=False),
        }

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        starts = {"q": 0, "k": 2, "v": 3}
        for name, tensor in weights:
            if name == "o":
                self.parameters["o"].data.copy_(tensor.chunk(2, dim=1)[self.number])
            else:
                part = tensor.chunk(2)[self.number]
                self.parameters["qkv"].data[starts[name] :][: len(part)].copy_(part)


@pytest.mark.parametrize("number", [0, 1])
def test_the_places_are_those_to_which_the_loader_copies(plugin: Any, number: int) -> None:
    rank = Rank(number)
    before = {name: parameter.clone() for name, parameter in rank.parameters.items()}
    places = plugin.find_places(rank.load, SHAPES, rank.parameters, "cpu")
    for name, parameter in rank.parameters.items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, before[name]), "the weights stay"
    matrices = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    rank.load(matrices.items())
    found = {name: torch.zeros_like(parameter) for name, parameter in rank.parameters.items()}
    for place in places:
        part = matrices[place.matrix][place.rows, place.columns]
        place.target(found[place.parameter]).copy_(part)
    for name, parameter in rank.parameters.items():
        assert torch.equal(found[name], parameter)


def test_a_loader_that_fails_leaves_the_weights(plugin: Any) -> None:
    rank = Rank(0)
    before = rank.parameters["qkv"].clone()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rank.load(weights)
        raise KeyError("no such weight")

    with pytest.raises(KeyError):
        plugin.find_places(load, SHAPES, rank.parameters, "cpu")
    assert torch.equal(rank.parameters["qkv"], before)


def test_a_matrix_without_a_place_is_named(plugin: Any) -> None:
    rank = Rank(0)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rank.load((name, tensor) for name, tensor in weights if name != "v")

    with pytest.raises(ValueError, match="the engine keeps v in an unknown place"):
        plugin.find_places(load, SHAPES, rank.parameters, "cpu")


def test_mixed_columns_are_refused(plugin: Any) -> None:
    parameter = Parameter(torch.zeros(6, 4), requires_grad=False)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            parameter.data.copy_(tensor[:, [0, 2, 1, 3]])

    with pytest.raises(ValueError, match="the engine mixes rows or columns of o"):
        plugin.find_places(load, {"o": (6, 4)}, {"o": parameter}, "cpu")
