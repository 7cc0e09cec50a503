"""The admin server, for people and Prometheus. Reads everything, changes nothing."""
