"""Rules about streams: work that could overlap and does not."""
