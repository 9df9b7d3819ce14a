"""Measurements of the engine on the user's machine: speculation off against on, over prompts of several tasks."""
