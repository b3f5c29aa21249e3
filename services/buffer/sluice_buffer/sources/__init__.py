"""Sources of groups: prompts in their order, given answers, dumped rollouts."""
