"""The fleet's side: the endpoint, its rounds, and what it keeps."""
