"""Rules of the buffer as pure functions: admission, checks, filters, order, balance."""
