"""Where the Kubernetes API server is and who we are, for the asynchronous half of the official client.

Its synchronous half reads kubeconfigs, service accounts and proxies, and runs exec plugins; it refreshes tokens, which
the asynchronous loader does only for some. It blocks, so a refresh runs in a thread.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from epp.errors import ConfigError

_SERVICE_ACCOUNT: Final = "KUBERNETES_SERVICE_HOST"
_EXPECTED: Final = "expected KUBECONFIG, a pod's service account, or ~/.kube/config"
_READ_AGAIN: Final = 60.0
"""Seconds until a service account's token is read again: kubelets replace it when a fifth of its life is left."""
_COPIED: Final = ("host", "ssl_ca_cert", "cert_file", "key_file", "verify_ssl", "tls_server_name")


class Credentials:
    """Those of `kubeconfig`, else the file in KUBECONFIG, else the pod's service account, else ~/.kube/config.

    ConfigError from the constructor if there are none that can be read; it does not connect.

    `clock`: seconds, monotonic.
    """

    def __init__(self, kubeconfig: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            import kubernetes
        except ImportError:
            expected = "the Python package `kubernetes` is missing; expected warmpath installed with its extra `kube`"
            raise ConfigError("", expected) from None
        self._clock = clock
        self._loaded: Any = kubernetes.client.Configuration()
        if _load(kubernetes.config, self._loaded, kubeconfig):
            self._loaded.refresh_api_key_hook = self._read_again(kubernetes.config)
        self.host = str(self._loaded.host)
        self.proxy = _proxy(self._loaded)
        self._refreshing = asyncio.Lock()

    def configuration(self) -> Any:
        """Settings for `kubernetes.aio.client.ApiClient`; each request asks them for a token that is valid now."""
        from kubernetes.aio.client import Configuration

        made: Any = Configuration()
        for name in _COPIED:
            setattr(made, name, getattr(self._loaded, name))
        made.proxy = self.proxy
        made.api_key = dict(self._loaded.api_key)
        made.refresh_api_key_hook = self._refresh
        return made

    def _read_again(self, config: Any) -> Any:
        """In place of the client's, which goes by the wall clock: set back by an hour, it would keep a token for it."""
        read_at = self._clock()

        def hook(configuration: Any) -> None:
            nonlocal read_at
            if self._clock() - read_at >= _READ_AGAIN:
                _load_service_account(config, configuration)
                read_at = self._clock()

        return hook

    async def _refresh(self, configuration: Any) -> None:
        """ConfigError where a token cannot be renewed."""
        if (hook := self._loaded.refresh_api_key_hook) is None:
            return
        async with self._refreshing:
            try:
                await asyncio.to_thread(hook, self._loaded)
            except Exception as error:  # as in `_load`
                raise ConfigError("", f"the Kubernetes credentials cannot be renewed: {sentence(error)}") from None
        configuration.api_key = dict(self._loaded.api_key)


def sentence(error: Exception) -> str:
    """What an error of a library says, in one line of at most 500 characters."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def _load_service_account(config: Any, configuration: Any) -> None:
    config.load_incluster_config(client_configuration=configuration, try_refresh_token=False)


def _load(config: Any, configuration: Any, kubeconfig: Path | None) -> bool:
    """Whether they are the pod's service account."""
    named = str(kubeconfig) if kubeconfig is not None else os.environ.get("KUBECONFIG")
    in_cluster = not named and _SERVICE_ACCOUNT in os.environ
    try:
        if in_cluster:
            _load_service_account(config, configuration)
        else:
            files = named or os.path.join("~", ".kube", "config")
            config.load_kube_config(config_file=files, client_configuration=configuration, persist_config=False)
    except Exception as error:  # the client raises what its parsers do: a wrong file may end in any of them
        where = "the pod's service account" if in_cluster else named or "~/.kube/config"
        raise ConfigError("", f"no Kubernetes credentials: {where}: {sentence(error)}; {_EXPECTED}") from None
    return in_cluster


def _proxy(configuration: Any) -> str | None:
    """The proxy that requests to the API server go through, by the kubeconfig or the environment; None: none."""
    from kubernetes.client.rest import should_bypass_proxies

    proxy = configuration.proxy
    if not proxy or should_bypass_proxies(configuration.host, configuration.no_proxy or ""):
        return None
    scheme = str(proxy).partition("://")[0].lower()
    if scheme not in ("http", "https"):
        raise ConfigError("", f"the proxy to the Kubernetes API server has scheme {scheme!r}; expected http or https")
    return str(proxy)
