"""The models of a trainer: the policy, its critic, its teachers."""
