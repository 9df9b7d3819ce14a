"""Weights in groups of 32, and the linear layers that use them."""
