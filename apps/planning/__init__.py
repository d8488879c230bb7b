"""Predict a model's memory and speed on a device."""
