"""Mapping between Megatron's parameters and the tensors of a Hugging Face checkpoint."""
