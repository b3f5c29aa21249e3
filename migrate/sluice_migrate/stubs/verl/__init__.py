"""verl's modules, as far as agent loops use them."""
