"""What is only Istio's of the overlay `istio`, for a cluster of `hack/kind-up --istio`.

Of the other files those tests that have it for a stack run there, too.
"""

from tests.e2e.conftest import Stack
from tests.e2e.test_requests import ask


def test_fallbacks_are_taken(istio: Stack) -> None:
    with istio.with_arguments("--fallbacks=2"), istio.entered() as url, istio.admin() as admin:
        for number in range(10):
            served, _ = ask(url, f"Request {number}")
            decision = admin.last_decision()
            assert decision["endpoint"].rpartition("/")[2] == served
            assert len(decision["fallbacks"]) == 2
