"""Rules about the capture: what the recording itself hides or distorts."""
