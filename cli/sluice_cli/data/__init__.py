"""`sluice data`: prompt files."""
