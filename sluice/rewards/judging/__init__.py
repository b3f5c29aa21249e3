"""Run rewards with limits, in separate processes or over HTTP."""
