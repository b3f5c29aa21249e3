"""Layers for `trainer.deterministic`, which compute the same bits as the trainer's."""
