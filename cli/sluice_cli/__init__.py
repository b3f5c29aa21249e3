"""The `sluice` command: run, check and explain jobs, show their state, and prepare their data."""
