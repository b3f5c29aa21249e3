"""Facts that decisions are made from: names, constants, observed state."""
