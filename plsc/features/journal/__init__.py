"""Class tables in mapped files that are part of the checkpoints."""
