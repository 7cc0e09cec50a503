"""The door: Envoy's ext_proc stream. Bytes in, bytes out; nothing here decides where a request goes."""
