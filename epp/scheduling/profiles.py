"""Profile handlers: which profiles run for a request, and whose picks count."""

from collections.abc import Sequence

from epp.plugin import Picked, ProfileHandler, Request, RunProfile


class SingleProfileHandler(ProfileHandler):
    """`single-profile-handler`: runs the one profile of the configuration; its picks are the answer.

    No parameters. Source: GIE v1.5 and llm-d-router. Raises ValueError when there is more than one profile.
    """

    def handle(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        if len(profiles) != 1:
            raise ValueError(f"single-profile-handler needs exactly one profile, found {', '.join(profiles) or 'none'}")
        return Picked(run(profiles[0]))
