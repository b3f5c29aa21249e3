"""`sluice pool`: engines on this machine that several jobs share."""
