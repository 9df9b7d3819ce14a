"""Several replicas of the server behind one address."""
