"""Search indexes with manifests."""
