"""The backends that run a bundle's graphs; :func:`edgevlm.runtime.engine.load_engine` loads a backend by name."""
