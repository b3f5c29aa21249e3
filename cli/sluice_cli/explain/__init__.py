"""Commands that describe sluice itself."""
