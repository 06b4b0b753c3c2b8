"""Flower as the second transport: devices and a fleet with letters between them instead of HTTP."""
