"""What the gateway refuses, and why. The text of each is one sentence for a person at a terminal.

GatewayError
 · ResourceError   a YAML file asks for something wrong or not supported: file, object, path, value, expectation
 · EnvoyError      Envoy is missing, does not start, or refuses a configuration
"""


class GatewayError(Exception):
    """Anything the gateway refuses to do."""


class ResourceError(GatewayError):
    """`where`: file and object (`route.yaml: HTTPRoute default/chat`); `path`: the place of the field in it."""

    def __init__(self, where: str, path: str, message: str) -> None:
        super().__init__(": ".join(part for part in (where, path, message) if part))
        self.where = where
        self.path = path
        self.message = message


class EnvoyError(GatewayError):
    """Envoy could not be found, started, updated; holds Envoy's own last words where there are any."""
