"""The EPP suite: numbered cases over gRPC against any endpoint picker, ours or another's.

MUST is what the endpoint picker protocol or Envoy's API demands of a full-duplex ext_proc server, or what a gateway
in use breaks without. SHOULD is what the norm leaves free and clients or gateways are better off with.
"""
