"""Fovea: retrieve coarsely, find what and where, reweight, answer. Nothing heavy is imported here."""

__version__ = "0.1.0"
