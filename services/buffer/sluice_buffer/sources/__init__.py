"""Where groups come from: prompts in their order, given answers, dumped rollouts."""
