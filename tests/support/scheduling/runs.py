"""What a profile handler is given, without profiles: `epp.plugin.RunProfile`."""

from collections.abc import Mapping, Sequence

from epp.plugin import Endpoint, Request


class Runs:
    """Each profile picks what `picks` says of it; `asked` are those that were run."""

    def __init__(self, picks: Mapping[str, Sequence[Endpoint]]) -> None:
        self._picks = picks
        self.candidates = [endpoint for endpoints in picks.values() for endpoint in endpoints]
        self.asked: list[str] = []

    def __call__(
        self, profile: str, request: Request | None = None, endpoints: Sequence[Endpoint] | None = None
    ) -> Sequence[Endpoint]:
        self.asked.append(profile)
        return self._picks[profile]
