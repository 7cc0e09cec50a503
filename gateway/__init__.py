"""Gateway API resources to Envoy configuration, and a local Envoy to run it. Shares only `epp.protocol` with the EPP."""
