"""FedNL Runtime: language models that learn while they run, on the device they run on."""

__version__ = "0.1.0"
