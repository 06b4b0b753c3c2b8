"""The HTTP streaming completion endpoint and the command line."""
