"""`warmpath explain`: where a request would go and why, without sending it."""
