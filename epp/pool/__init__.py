"""What we know of the servers: endpoints, their load, and where the list of them comes from."""
