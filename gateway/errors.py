"""What the gateway refuses, and why. The text of each is one sentence for a person at a terminal.

GatewayError
 · EnvoyError   Envoy is missing, does not start, or refuses a configuration

What a YAML file asks for that is wrong or not supported is a ConfigError, with file, object, path, value, expectation.
"""


class GatewayError(Exception):
    """Anything the gateway refuses to do."""


class EnvoyError(GatewayError):
    """Envoy could not be found, started, updated; holds Envoy's own last words where there are any."""
