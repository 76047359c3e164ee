"""Where Jobs run: the Hub's API, local processes, and what runs inside the trainer Job."""
