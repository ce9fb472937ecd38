"""What forecasts are fed with: costs of layers and links, and contention, measured here."""
