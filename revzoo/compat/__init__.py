"""Names of other libraries on revzoo's mechanism, so that an import line is all that changes."""
