"""The second door, for people and Prometheus. Reads everything, changes nothing."""
