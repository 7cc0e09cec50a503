"""The ext_proc server: Envoy's streams, bytes in, bytes out. Nothing here decides where a request goes."""
