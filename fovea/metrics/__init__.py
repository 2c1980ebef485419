"""Metrics, each under the name of its official rule."""
