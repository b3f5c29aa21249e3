"""User functions: loading and running them."""
