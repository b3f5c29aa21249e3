"""`trainer.deterministic`: layers that compute the same bits as the trainer's."""
