"""Who still remembers this prompt: prefix chains and models of the endpoints' caches. No I/O."""
