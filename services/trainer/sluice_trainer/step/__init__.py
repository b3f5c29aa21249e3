"""An optimizer step as all backends share it, whichever library computes the model."""
