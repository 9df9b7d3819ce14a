"""Training of drafters: the target answers prompts, and heads learn to foresee its answers."""
