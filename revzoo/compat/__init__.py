"""Other libraries' interfaces on revzoo's mechanism: to switch, change one import."""
