"""Rewards and teacher log-probs of finished samples."""
