"""May a request go now? Only those of negative priority can be refused, and only while the pool is full."""

from collections.abc import Sequence

from epp.errors import InternalError, Rejected
from epp.plugin import Detector, Endpoint, Request


class Admission:
    """Sheds requests of negative priority while the pool is saturated; what GIE and llm-d do without flow control.

    `detector` may be replaced between two requests (a reload does).
    """

    def __init__(self, detector: Detector) -> None:
        self.detector = detector

    def admit(self, request: Request, endpoints: Sequence[Endpoint]) -> None:
        """Return if `request` may be sent to one of `endpoints` now. Raises Rejected (429)."""
        if request.priority >= 0:
            return
        try:
            saturation = self.detector.saturation(endpoints)
        except Exception as error:
            raise InternalError(f"plugin {self.detector.name!r} failed") from error
        if saturation >= 1.0:
            raise Rejected(
                f"the pool is full (saturation {saturation:.2f}) and requests of priority {request.priority} wait "
                "for better times; retry later"
            )
