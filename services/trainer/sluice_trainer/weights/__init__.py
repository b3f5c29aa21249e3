"""Weight updates: bring the trainer's weights to the engines.

One update passes through these modules:

- `update`: what all ranks of the trainer do together.
- `update_session`: the blocking calls that one rank's training loop makes.
- `sender`: one rank's side of the phases prepare, pause, transfer, verify and resume.
- `phases` and `lateness`: run a phase on all engines, and give up an engine that fails or is late.
- `buckets`: pack named tensors into flat buffers.
- `transport`: the interface of the ways to an engine: `chain`, `collective`, `ipc`, `disk`.
"""
