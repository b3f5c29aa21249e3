"""The models of a trainer: policy, critic, reference and teacher."""
