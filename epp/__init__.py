"""Warmpath's endpoint picker: Envoy sends each request here and gets back the endpoint that answers soonest.

A request passes `extproc`, `route`, `parsing`, `prefix`, `pool`, `flow` and `scheduling`: docs/architecture.md. Users
import `epp.plugin` and `epp.testing` only.
"""

__version__ = "0.1.0"
