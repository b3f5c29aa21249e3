"""Functions of users that make samples: loading and running them."""
