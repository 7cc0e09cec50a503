"""Long prompts go to the endpoints with the label `context: long`, short ones to the others, where there are any."""

from collections.abc import Sequence
from dataclasses import dataclass

from epp.plugin import Endpoint, Filter, Request


@dataclass
class LongPromptsApart(Filter):
    """So that a prompt of many tokens does not stall the answers of short ones."""

    tokens: int = 8000
    """From so many on a prompt is long."""

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        long = request.tokens >= self.tokens
        fitting = [each for each in endpoints if (each.labels.get("context") == "long") == long]
        return fitting or endpoints
