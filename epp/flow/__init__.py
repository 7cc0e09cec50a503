"""May it go now: admission before scheduling. Knows nothing of prefixes or scores."""
