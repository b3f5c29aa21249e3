"""The model as Megatron builds it: layer specs, attention over packed sequences, experts."""
