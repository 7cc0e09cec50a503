"""LMCache's tiers below the engines: L1 of a node, L2 of the cluster."""
