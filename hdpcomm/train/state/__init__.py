"""Where the parts of a model's state are, and how they move between ranks."""
