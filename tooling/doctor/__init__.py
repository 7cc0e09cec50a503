"""`warmpath doctor`: what is wrong with endpoints and their caches, and the flag that fixes it."""
