"""The bodies that requests and answers have."""
