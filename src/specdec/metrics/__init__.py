"""What the engine counts."""
