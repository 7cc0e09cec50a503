"""`--peer NAME=COMMAND`: another project's picker, to be measured beside ours."""

import argparse

OURS = "warmpath"


def peer(text: str) -> tuple[str, str]:
    """Name and command. Raises ArgumentTypeError."""
    name, _, command = text.partition("=")
    if not name or not command or "," in name or name == OURS:
        raise argparse.ArgumentTypeError(f"expected NAME=COMMAND with a name of its own, got {text!r}")
    return name, command
