"""The interfaces of other libraries on revzoo's mechanism: to switch, change one import."""
