"""Rules about synchronization: host waits that leave the GPU idle."""
