"""The whole chain on one machine: simulated pods, EPP replicas, Envoy, a live table and a built-in workload."""
