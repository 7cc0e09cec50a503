"""The token ids that an engine will see for a request."""
