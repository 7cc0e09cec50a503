"""The client of a Kubernetes API server: credentials, lists and watch streams as bytes, failures as one error.

The official client brings authentication, TLS and token refresh. Its models are left aside: building one takes longer
than everything else about a pod, so answers come as bytes and `pool.watch` reads what it needs. The client is an
optional dependency and takes half a second to import, so it is imported where it is first needed.

Everything here blocks; it is called from threads.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from epp.errors import ConfigError

_CONNECT_TIMEOUT: Final = 2.0
"""Short, so that a server that comes back is found soon, and did not only look as if it were there."""
_READ_TIMEOUT: Final = 30.0
_REVIEW_TIMEOUT: Final = 5.0
_PAGE: Final = 500
"""Objects in one answer to a list."""
_LARGEST_ANSWER: Final = 256 * 1024 * 1024
_LARGEST_EVENT: Final = 16 * 1024 * 1024
_CONNECTIONS: Final = 64
_SERVICE_ACCOUNT: Final = "KUBERNETES_SERVICE_HOST"


class Kind(NamedTuple):
    """A namespaced resource. The core group is empty; of it we know pods."""

    group: str
    version: str
    plural: str

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS: Final = Kind("", "v1", "pods")


class ApiError(Exception):
    """The API server said no (`status` is HTTP's) or could not be reached (`status` 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}" if status else message)
        self.status = status


class User(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who a token belongs to, as the API server gives it and expects it."""

    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = {}


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: User = User()


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _AccessStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus


class Stream:
    """A watch that is open: a line of JSON for each event."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def lines(self) -> Iterator[bytes]:
        """Lines as they come, until the server ends the watch. ApiError if the connection breaks."""
        rest = b""
        with _failures():
            for chunk in self._response.stream(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _LARGEST_EVENT:
                    raise ApiError(0, f"an event of more than {_LARGEST_EVENT} bytes")
                yield from filter(None, lines)

    def abort(self) -> None:
        """End `lines` from another thread."""
        # The reader may be done with the connection at this very moment; then there is nothing left to end.
        with suppress(OSError, RuntimeError, ValueError):
            self._response.shutdown()


class ApiServer:
    """The API server our credentials name: `kubeconfig`, else the file in KUBECONFIG, else the pod's service account,
    else ~/.kube/config.

    ConfigError from the constructor if there are none that can be read; it does not connect yet.
    """

    def __init__(self, kubeconfig: Path | None = None) -> None:
        first = "kubernetes" not in sys.modules
        try:
            import kubernetes
        except ImportError:
            expected = "the Python package `kubernetes` is missing; expected warmpath installed with its extra `kube`"
            raise ConfigError("", expected) from None
        configuration = kubernetes.client.Configuration()
        _load_credentials(kubernetes.config, configuration, kubeconfig)
        configuration.retries = False  # `pool.watch` tries again
        configuration.connection_pool_maxsize = _CONNECTIONS
        self.host = str(configuration.host)
        client = kubernetes.client.ApiClient(configuration)
        self._pods = kubernetes.client.CoreV1Api(client).list_namespaced_pod
        self._objects = kubernetes.client.CustomObjectsApi(client).list_namespaced_custom_object
        self._token_review = kubernetes.client.AuthenticationV1Api(client).create_token_review
        self._access_review = kubernetes.client.AuthorizationV1Api(client).create_subject_access_review
        if first:
            # The client is a hundred thousand objects that never go. Unless they are set aside, each full collection
            # looks at all of them, and the event loop stands still for a quarter of a second.
            gc.collect()
            gc.freeze()

    def page(self, kind: Kind, namespace: str, selector: str, continuation: str) -> bytes:
        """One page of a list, newest state; `continuation` is empty for the first."""
        query: dict[str, Any] = {"limit": _PAGE, "_request_timeout": (_CONNECT_TIMEOUT, _READ_TIMEOUT)}
        if continuation:
            query["_continue"] = continuation
        with _failures():
            response = self._list(kind)(namespace, label_selector=selector, **query)
            try:
                body: bytes = response.read(_LARGEST_ANSWER + 1)
                response.release_conn()
            finally:
                response.close()
        if len(body) > _LARGEST_ANSWER:
            raise ApiError(0, f"a list of {kind} of more than {_LARGEST_ANSWER} bytes")
        return body

    @contextmanager
    def stream(self, kind: Kind, namespace: str, selector: str, version: str, seconds: int) -> Iterator[Stream]:
        """A watch from a resource version on. The server ends it after so many seconds, at the latest."""
        with _failures():
            response = self._list(kind)(
                namespace,
                label_selector=selector,
                resource_version=version,
                watch=True,
                allow_watch_bookmarks=True,
                timeout_seconds=seconds,
                # A server that vanished without a word is noticed when it fails to end the watch.
                _request_timeout=(_CONNECT_TIMEOUT, seconds + _READ_TIMEOUT),
            )
        try:
            yield Stream(response)
        finally:
            response.close()

    def authenticate(self, token: str) -> User | None:
        """Whose token this is; None if it is not valid. Needs the right to create TokenReviews."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        status = _reviewed(self._token_review, body, _TokenReview).status
        return status.user if status.authenticated and status.user.username else None

    def authorized(self, user: User, path: str) -> bool:
        """Whether a ClusterRole lets this user get a nonResourceURL. Needs the right to create SubjectAccessReviews."""
        asked = {"nonResourceAttributes": {"path": path, "verb": "get"}, "user": user.username}
        asked |= {"uid": user.uid, "groups": user.groups, "extra": user.extra}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": asked}
        return _reviewed(self._access_review, body, _AccessReview).status.allowed

    def _list(self, kind: Kind) -> Callable[..., Any]:
        if kind == PODS:
            return lambda namespace, **query: self._pods(namespace, _preload_content=False, **query)
        return lambda namespace, **query: self._objects(
            kind.group, kind.version, namespace, kind.plural, _preload_content=False, **query
        )


def _load_credentials(config: Any, configuration: Any, kubeconfig: Path | None) -> None:
    named = str(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG")
    in_cluster = not named and _SERVICE_ACCOUNT in os.environ
    try:
        if in_cluster:
            config.load_incluster_config(client_configuration=configuration)
        else:
            files = named or os.path.join("~", ".kube", "config")
            config.load_kube_config(config_file=files, client_configuration=configuration, persist_config=False)
    except Exception as error:  # the client raises what its parsers do: a wrong file may end in any of them
        where = "the pod's service account" if in_cluster else named or "~/.kube/config"
        raise ConfigError("", f"no Kubernetes credentials: {where}: {_sentence(error)}; {_EXPECTED}") from None


R = TypeVar("R")


def _reviewed(create: Callable[..., Any], body: Any, shape: type[R]) -> R:
    with _failures():
        response = create(body, _preload_content=False, _request_timeout=(_CONNECT_TIMEOUT, _REVIEW_TIMEOUT))
        try:
            answer: bytes = response.read(_LARGEST_EVENT)
            response.release_conn()
        finally:
            response.close()
    try:
        return msgspec.json.decode(answer, type=shape)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ApiError(0, f"not the review a Kubernetes API server sends: {error}") from None


_EXPECTED: Final = "expected KUBECONFIG, a pod's service account, or ~/.kube/config"


@contextmanager
def _failures() -> Iterator[None]:
    """Whatever the client and the libraries below it raise, as ApiError."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise ApiError(error.status or 0, _reason(error)) from None
    except (HTTPError, OSError) as error:
        raise ApiError(0, _sentence(error)) from None


class _Status(msgspec.Struct):
    message: str = ""


def _reason(error: Any) -> str:
    """What the API server wrote, else HTTP's own words."""
    with suppress(msgspec.DecodeError, TypeError, RecursionError):
        if message := msgspec.json.decode(error.body, type=_Status).message:
            return message[:500]
    return str(error.reason)[:500]


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
