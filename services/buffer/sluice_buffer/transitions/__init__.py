"""Changes of the buffer's state: leases, submissions, batches, evaluation rounds, failures."""
