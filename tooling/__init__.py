"""All that is not the picker itself: simulator, replay, other projects' policies, doctor, conformance, laptop."""
