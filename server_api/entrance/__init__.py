"""Who may come in, how much and how fast, and how everybody leaves."""
