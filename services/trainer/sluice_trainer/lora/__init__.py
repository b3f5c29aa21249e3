"""Low-rank adapters as both backends see them: first weights, PEFT's files, checkpoints."""
