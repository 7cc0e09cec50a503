"""KV events of the engines: what each says that its KV cache holds."""
