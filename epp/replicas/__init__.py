"""What replicas of the picker tell each other, so that each knows of a request whichever of them it passed."""
