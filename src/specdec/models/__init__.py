"""Models: finding, loading and running them."""
