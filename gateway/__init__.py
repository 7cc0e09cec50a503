"""Gateway API resources to Envoy configuration, and a local Envoy to run it; shares only `epp.protocol` with `epp`."""
