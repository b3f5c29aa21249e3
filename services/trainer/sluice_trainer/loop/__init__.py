"""The training loop: what happens in a step, and between steps."""
