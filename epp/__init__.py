"""Warmpath's endpoint picker: Envoy sends each request here and gets back the endpoint that answers soonest.

Packages in the order a request passes them: `extproc` (the wire) -> `route` (the path of a request) ->
`parsing`, `flow`, `pool`, `prefix`, `scheduling`. Users import `epp.plugin` and `epp.testing` only.
"""

__version__ = "0.1.0"
