"""The sync agent and the aggregation endpoint: sharing the rules by which memories learn."""
