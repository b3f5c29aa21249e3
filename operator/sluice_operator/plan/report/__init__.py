"""Status, conditions and events: what people and programs are told of a job."""
