"""Tells which weights sampled the tokens of an unfinished answer, for answers by parts.

SGLang from 0.5.21 on tells so with a finished answer only; for earlier ones see versions.py.
"""

from importlib.util import find_spec
from typing import Any

STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if find_spec("sglang.srt.utils.weight_versions"):
        HookRegistry.register(
            f"{STREAMER}._GenerationStreamAccumulator.accept", add_versions, HookType.AFTER
        )


def add_versions(_: Any, outputs: Any, req: Any) -> None:
    """Add the versions to a request's output, if the request is streamed and has one now."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    has_output = outputs.rids[-1:] == [req.rid] and len(outputs.weight_versions) == len(
        outputs.rids
    )
    if req.stream and not req.finished() and has_output:
        outputs.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=outputs.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )
