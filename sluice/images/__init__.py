"""Images in prompts, conversations and samples, from the row to the trainer."""
