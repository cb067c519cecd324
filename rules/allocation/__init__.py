"""Rules about allocation: memory and objects made again and again."""
