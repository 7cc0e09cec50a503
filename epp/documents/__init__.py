"""YAML that people write, read strictly: nothing is guessed, nothing is ignored, every error says where."""
