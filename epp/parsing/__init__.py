"""What is being asked: HTTP bodies to `Request`. No I/O, no knowledge of endpoints."""
