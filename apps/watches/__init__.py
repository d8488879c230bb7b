"""Watches (standing questions), the events that they open and close, and the sinks that receive these events."""
