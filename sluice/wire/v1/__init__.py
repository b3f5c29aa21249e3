"""Generated from protos/sluice/v1 by make protos."""
