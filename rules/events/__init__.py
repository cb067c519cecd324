"""Rules about events between streams and between stream and host."""
