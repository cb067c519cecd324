"""Rules about the L2 cache: set-aside and access-policy windows."""
