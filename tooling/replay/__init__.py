"""A trace through the production scheduler and simulated pods, in virtual time: which policy would serve it best."""
