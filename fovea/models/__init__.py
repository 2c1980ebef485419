"""Encoders, region proposers, segmenters and generators behind small interfaces."""
