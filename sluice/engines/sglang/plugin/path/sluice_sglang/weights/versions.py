"""Notes for each token which weights sampled it, for SGLang before 0.5.21, which does not tell.

Such an SGLang adds to an answer the version that the server knows when it passes the answer on.
Tokens of the old weights may still be on their way then: they come through another process than the
news of an update. So the version is noted when tokens are sampled, as SGLang's `customized_info`: a
separate list for the tokens, in `meta_info`.
"""

from importlib.util import find_spec
from typing import Any

from .adapter import version_of

KEY = "sluice_versions"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
COMPONENTS = "sglang.srt.managers.scheduler_components"
UPDATER = f"{COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"
PROCESSOR = f"{COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor"
UPDATES = ("disk", "distributed", "tensor")
# Version of this process's weights; None before any update.
_present: dict[str, str | None] = {"version": None}


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if find_spec("sglang.srt.utils.weight_versions"):
        return
    for source in UPDATES:
        HookRegistry.register(f"{UPDATER}.update_weights_from_{source}", updated, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.pause_generation", before_pause, HookType.BEFORE)
    HookRegistry.register(f"{PROCESSOR}._maybe_collect_customized_info", note, HookType.AFTER)


def updated(result: Any, updater: Any, request: Any) -> None:
    """Note the version, which comes with the last bucket of an update."""
    if result.success and request.weight_version is not None:
        _present["version"] = request.weight_version


def before_pause(scheduler: Any, request: Any) -> None:
    """Mark sampled tokens that are not processed; `in_place` processes them after the update."""
    for _, result in getattr(scheduler, "result_queue", ()):
        if getattr(result, "logits_output", None) is not None:
            result.logits_output.sluice_version = _present["version"]


def note(result: Any, processor: Any, i: int, request: Any, logits_output: Any) -> None:
    """Note the version of a pass's tokens: one, or the accepted ones of a draft."""
    if request.customized_info is None:
        request.customized_info = {}
    version = version_of(request) or getattr(logits_output, "sluice_version", _present["version"])
    versions = request.customized_info.setdefault(KEY, [])
    versions += [version] * (len(request.output_ids) - len(versions))
