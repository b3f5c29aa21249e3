"""An optimizer step: micro-batches, forward and backward passes, gradient sum and update."""
