"""slime's modules, as far as generate functions use them."""
