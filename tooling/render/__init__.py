"""`warmpath render`: a few values to the manifests of a whole stack."""
