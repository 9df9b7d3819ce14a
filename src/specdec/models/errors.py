"""What goes wrong with models."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be found, read or run; the message names the file and the thing, and says what would do."""


class TextError(ValueError):
    """A text that cannot be encoded; the message says where and why."""
