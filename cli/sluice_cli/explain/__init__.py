"""Commands that explain sluice: explain, crd, reference."""
