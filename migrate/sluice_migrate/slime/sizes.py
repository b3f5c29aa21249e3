"""slime's arguments for batches and GPUs, some of which follow from others."""

from __future__ import annotations

from sluice_migrate.draft import Draft, Settings, integer, put


def batches(draft: Draft, settings: Settings) -> None:
    """slime: rollout-batch-size x n-samples = global-batch-size x num-steps-per-rollout."""
    batch = draft.get("rollout.batchSize", 0)
    samples = batch * draft.get("rollout.samplesPerPrompt", 1)
    if not put(draft, "trainer.stepsPerBatch", settings.take("--num-steps-per-rollout"), integer):
        size = settings.take("--global-batch-size")
        put(
            draft,
            "trainer.stepsPerBatch",
            size,
            lambda value: steps_per_batch(samples, integer(value)),
        )
    if batch:
        over = settings.take("--over-sampling-batch-size")
        put(draft, "rollout.overSampling", over, lambda value: integer(value) / batch)


def steps_per_batch(samples: int, size: int) -> int:
    """Optimizer steps of a batch. ValueError where it cannot be split evenly."""
    if size < 1 or samples % size:
        raise ValueError(
            f"{samples} samples of a batch cannot be split into optimizer steps of {size}"
        )
    return samples // size


def placement(draft: Draft, settings: Settings) -> None:
    """GPUs of the engines. slime counts GPUs, sluice engines."""
    trainer = draft.get("trainer.nodes", 1) * draft.get("trainer.gpusPerNode", 8)
    machine = _number(settings, "--num-gpus-per-node", 8)
    engine = _number(settings, "--rollout-num-gpus-per-engine", 1)
    colocated = settings.on("--colocate")
    total = trainer if colocated else _number(settings, "--rollout-num-gpus", trainer)
    draft.set("rollout.gpusPerReplica", min(engine, machine), "--rollout-num-gpus-per-engine")
    if engine > machine:
        draft.set("rollout.nodesPerReplica", -(-engine // machine), "--rollout-num-gpus-per-engine")
    if colocated and draft.get("trainer.gpusPerNode", 8) % engine == 0:
        draft.set("trainer.colocate", True, "--colocate")
        if settings.on("--no-offload") or settings.on("--no-offload-train"):
            draft.set("trainer.offload", "none", "--no-offload-train")
        return
    draft.set(
        "rollout.replicas",
        max(1, total // engine),
        "--colocate" if colocated else "--rollout-num-gpus",
    )
    if colocated:
        why = f"with sluice an engine of {engine} GPUs cannot share those of the trainer's machines"
        draft.note(
            "check",
            "rollout.replicas",
            f"{why}: trainer and engines take {trainer + total} GPUs in all",
        )


def _number(settings: Settings, name: str, default: int) -> int:
    setting = settings.take(name)
    return (
        int(setting.value)
        if setting and str(setting.value).isdigit() and int(setting.value)
        else default
    )
