"""The device's side: its recent text, its own rules, the agent that syncs."""
