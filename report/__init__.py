"""What a run shows of itself: curves, summary, model card, and the proxy's page."""
