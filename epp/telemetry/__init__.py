"""Metrics and logs. Every package may import this one; it imports none of them."""
