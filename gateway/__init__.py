"""Gateway API resources to Envoy configuration, and a local Envoy to run it.

Of `epp` it shares the wire's names (`epp.protocol`) and how documents are read (`epp.documents`).
"""
