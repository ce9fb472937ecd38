"""Predictions: batches climb the stages, turn, and come down."""
