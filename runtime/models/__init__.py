"""The model that ships with the package."""
