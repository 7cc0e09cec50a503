"""`warmpath sidecar`: beside an engine that decodes; has prompts computed by another one."""
