"""Built-in rewards, one per file. `sluice.rewards.registry` lists them by name."""
