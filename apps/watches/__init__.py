"""Standing questions: watches, the events they open and close, and the sinks that receive them."""
