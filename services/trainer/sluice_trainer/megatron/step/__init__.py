"""One optimizer step: sequences into micro-batches, forward, survey, gradient, update."""
