"""From a request for text to its answer, whole or streamed."""
