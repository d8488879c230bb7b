"""The command line, the server, the sources and the demo."""
