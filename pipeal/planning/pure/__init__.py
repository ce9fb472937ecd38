"""Costs, layouts, simulation and forecasts: values in, values out; no torch, no thread."""
