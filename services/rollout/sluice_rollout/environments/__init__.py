"""Environments: programs in processes, containers or pods that play episodes of agents."""
