"""From a step of sequences to a forward pass."""
