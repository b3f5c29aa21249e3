"""The parts of an optimizer step that all backends share."""
