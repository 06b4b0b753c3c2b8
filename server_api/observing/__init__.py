"""What the server tells whoever runs it: logs, metrics, timings."""
