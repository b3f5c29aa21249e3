"""`sluice data`: inspect and make prompt files."""
