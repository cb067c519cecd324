"""Rules about launches: kernels and graphs that cost more to start than needed."""
