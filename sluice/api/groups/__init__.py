"""The groups of an RLJob's spec, one file each."""
