"""Rules about transfers: copies that are slower than they need to be."""
