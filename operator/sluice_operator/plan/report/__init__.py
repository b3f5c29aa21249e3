"""Status, conditions and events, which report a job to people and programs."""
