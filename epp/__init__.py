"""Warmpath's endpoint picker: Envoy sends each request here and gets back the endpoint that answers soonest.

Rooms, from the street to the cellar: `extproc` (the wire) -> `route` (the way of a request) ->
`parsing`, `flow`, `pool`, `prefix`, `scheduling`. Users import `epp.plugin` and `epp.testing` only.
"""

__version__ = "0.1.0"
