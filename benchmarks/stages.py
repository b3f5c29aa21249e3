"""Outputs of the stages of a dense decoder, in transformers, Megatron and SGLang, by one name.

`embedding`, `3.norm`, `3.attention`, `3.mlp`, `3.out` (the residual stream behind layer 3), `final
norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# [tokens, h] float32, in host memory.
Stages = dict[str, Tensor]
WITHIN = {"norm": "input_layernorm", "attention": "self_attn", "mlp": "mlp"}
_MEGATRON = {"self_attn": "self_attention"}


def of_transformers(body: Any) -> dict[str, nn.Module]:
    """The modules of a model without its output layer."""
    layers = {
        f"{i}.{stage}": getattr(layer, name)
        for i, layer in enumerate(body.layers)
        for stage, name in WITHIN.items()
    }
    outs = {f"{i}.out": layer for i, layer in enumerate(body.layers)}
    return {"embedding": body.embed_tokens, **layers, **outs, "final norm": body.norm}


def of_megatron(model: Any) -> dict[str, nn.Module]:
    """The modules of a GPTModel."""
    layers = {
        f"{i}.{stage}": getattr(layer, _MEGATRON.get(name, name))
        for i, layer in enumerate(model.decoder.layers)
        for stage, name in WITHIN.items()
    }
    outs = {f"{i}.out": layer for i, layer in enumerate(model.decoder.layers)}
    final = model.decoder.final_layernorm
    return {"embedding": model.embedding, **layers, **outs, "final norm": final}


@contextmanager
def recorded(modules: dict[str, nn.Module]) -> Iterator[Stages]:
    """Outputs of the modules while this is open; the last call of each counts."""
    stages: Stages = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        stages[name] = first.detach().float().cpu().flatten(0, -2)

    handles = [
        module.register_forward_hook(partial(keep, name)) for name, module in modules.items()
    ]
    try:
        yield stages
    finally:
        for handle in handles:
            handle.remove()


def of_sglang(directory: Path, tokens: list[int]) -> Stages:
    """The pass over exactly these tokens, out of what --debug-tensor-dump-output-folder wrote.

    Raises FileNotFoundError where there is none.
    """
    for file in sorted(directory.glob("*/Pass*.pt")):
        dump = torch.load(file)
        ids = dump.get("model.forward_batch_info.input_ids")
        if ids is not None and ids.tolist() == tokens:
            return dict(_of_dump(dump))
    raise FileNotFoundError(f"{directory}: no pass over these {len(tokens)} tokens")


def _of_dump(dump: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """SGLang adds the residual in front of a norm: that gives the norm and the sum."""
    count = 1 + max(int(name.split(".")[2]) for name in dump if name.startswith("model.layers."))
    yield "embedding", dump["model.embed_tokens"].float()
    for i in range(count):
        layer = f"model.layers.{i}"
        first = dump[f"{layer}.input_layernorm"]
        yield f"{i}.norm", (first[0] if isinstance(first, list) else first).float()
        yield f"{i}.attention", dump[f"{layer}.self_attn.o_proj"].float()
        yield f"{i}.mlp", dump[f"{layer}.mlp.down_proj"].float()
        after = "model.norm" if i + 1 == count else f"model.layers.{i + 1}.input_layernorm"
        yield f"{i}.out", dump[after][1].float()
    yield "final norm", dump["model.norm"][0].float()


def off(stage: Tensor, exact: Tensor) -> float:
    """The distance as a share of the exact values' size."""
    return float((stage - exact).norm() / exact.norm())


# Parts of a model of transformers that can each be computed in bf16 alone.
KINDS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "embedding": lambda model: [model.model.embed_tokens],
    "norms": lambda model: [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")],
    "rotary angles": lambda model: [model.model.rotary_emb],
    "attention, its projections included": lambda model: [x.self_attn for x in model.model.layers],
    "mlp": lambda model: [layer.mlp for layer in model.model.layers],
    "residual stream": lambda model: list(model.model.layers),
    "head": lambda model: [model.lm_head],
}


@contextmanager
def in_bf16(kind: str, model: Any) -> Iterator[None]:
    """One kind of part of a float32 model in bf16: its inputs, its weights, its outputs.

    Of the residual stream only what a layer is given and gives is rounded.
    """
    modules = KINDS[kind](model)
    handles = []
    for module in modules:
        if kind != "residual stream":
            # The copy of a tied weight must not reach the other module that has it.
            for name, parameter in list(module.named_parameters()):
                owner = module.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], nn.Parameter(parameter.bfloat16(), False))
            handles += [module.register_forward_pre_hook(_narrow, with_kwargs=True)]
        handles += [module.register_forward_hook(_widen)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _narrow(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, torch.bfloat16), {k: _cast(v, torch.bfloat16) for k, v in kwargs.items()}


def _widen(module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(_cast(output, torch.bfloat16), torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    return value
